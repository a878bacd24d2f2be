"""jFAT: joint federated adversarial training of the whole model, the paper's memory-hungry reference.

Every client trains all of w, and the server averages: w ← Σ_k q_k w_k / Σ_k q_k. Where the model does not fit a
client's memory, the simulated clock adds what swapping takes.
"""

from fedprophet.methods.baseline import Baseline, BaselineState


class JointTraining(Baseline[BaselineState]):
    """Average whole models that were trained adversarially: what baselines do unless they say otherwise."""

    state = BaselineState
