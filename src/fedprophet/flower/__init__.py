"""FedProphet on Flower: tasks and answers travel as messages, in a simulation or between machines.

Flower and Ray are optional. `register` and `settings` work without them; every other module needs them, and is imported
only for a run on Flower.
"""
