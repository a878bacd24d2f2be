"""Norm statistics of several clients as those of all their samples together.

The variance of what all clients read is the mean of their variances plus the variance of their means: with weights q_k
that sum to 1, means m_k and variances v_k,

    m = Σ_k q_k m_k,    v = Σ_k q_k (v_k + (m_k − m)²).

So a client's variance is widened by how far its mean lies from the joined one, and then joined by the run's rule, like
any parameter. Under a rule that resists bad updates, a few clients can move it no further than anything else.
"""

from collections import ChainMap
from collections.abc import Iterable

from torch import Tensor

from fedprophet.cascade.norms import variances
from fedprophet.server.rules.registry import Join, Parameters, Update


def pooled(join: Join) -> Join:
    """Return the rule with statistics pooled."""

    def joined(current: Parameters, updates: Iterable[Update]) -> dict[str, Tensor]:
        given = list(updates)
        means = join(current, [(weight, means_of(sent)) for weight, sent in given])
        return join(current, [(weight, widened(sent, means)) for weight, sent in given])

    return joined


def means_of(sent: Parameters) -> Parameters:
    """Return the means among tensors whose variances are there too."""
    return {mean: sent[mean] for mean in variances(sent).values()}


def widened(sent: Parameters, means: Parameters) -> Parameters:
    """Return what a client sent with its variances taken about other means than its own."""
    wider: dict[str, Tensor] = {}
    for name, mean in variances(sent).items():
        apart = sent[mean].detach().double() - means[mean].to(sent[mean].device).double()
        wider[name] = (sent[name].detach().double() + apart.square()).to(sent[name].dtype)
    # A view: a sub-network's tensors may be made on demand.
    return ChainMap(wider, sent) if wider else sent  # type: ignore[arg-type]
