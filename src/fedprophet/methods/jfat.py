"""jFAT: joint federated adversarial training of the whole model, the paper's memory-hungry reference.

Every client trains all of w, and the server averages: w ← Σ_k q_k w_k / Σ_k q_k. Where the model does not fit a
client's memory, the simulated clock adds what swapping takes.
"""

from fedprophet.methods.baseline import Baseline, BaselineState
from fedprophet.methods.registry import method


@method("jfat", "joint adversarial training of the whole model, however much memory that takes", paper="jFAT", row=1)
class JointTraining(Baseline[BaselineState]):
    """Average whole models that were trained adversarially: a baseline's defaults."""

    state = BaselineState
