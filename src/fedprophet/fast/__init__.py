"""Local training without autograd: the same computation as the plain path, for many clients at once.

A part of a chain is read as a `LayerProgram` of convolution blocks and dense layers (`program`). Networks of K clients
lie stacked in one tensor for each parameter (`stack`), sub-networks of any width among them (`narrow`). All they do
(the attack on folded networks, the training step, evaluation) is written out in a handful of operations on stacks
(`kernels`): Triton kernels on a GPU (`gpu`), plain torch elsewhere.
"""
