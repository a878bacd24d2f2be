"""What server and clients exchange, on every engine: a task one way, an answer the other.

There is one frozen class for each kind of task (`tasks`) and one for its answer (`answers`). The codec turns them, and
the states of checkpoints, into JSON and tensors and back. Nothing else passes between server and client.
"""
