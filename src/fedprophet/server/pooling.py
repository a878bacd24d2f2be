"""Norm statistics of several clients as those of all their samples together.

The variance of what all clients read is the mean of their variances plus the variance of their means: with weights q_k
that sum to 1, means m_k and variances v_k,

    m = Σ_k q_k m_k,    v = Σ_k q_k (v_k + (m_k − m)²).

So a client's variance is widened by how far its mean lies from the joined one, and then joined by the run's rule, like
any parameter. Under a rule that resists bad updates, a few clients can move it no further than anything else.

Means, variances and everything else are joined apart: a rule that measures how far an update goes must not measure
weights by statistics, which have other units.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedprophet.cascade.norms import variances
from fedprophet.server.rules.registry import Join, Parameters, Update


def pooled(join: Join, numbers: Join | None = None) -> Join:
    """Return a rule with statistics pooled, by the rule `numbers` where it is another one."""
    of_statistics = numbers or join

    def joined(current: Parameters, updates: Iterable[Update]) -> dict[str, Tensor]:
        given = list(updates)
        centred = of_statistics(current, [(weight, means_of(sent)) for weight, sent in given])
        spread = of_statistics(centred, [(weight, widened(sent, centred)) for weight, sent in given])
        return join(spread, [(weight, others(sent)) for weight, sent in given])

    return joined


def means_of(sent: Parameters) -> Parameters:
    """Return the means among tensors whose variances are there too."""
    return {mean: sent[mean] for mean in variances(sent).values()}


def widened(sent: Parameters, means: Parameters) -> Parameters:
    """Return a client's variances, taken about other means than its own; none is more than its type can hold."""
    wider: dict[str, Tensor] = {}
    for name, mean in variances(sent).items():
        apart = sent[mean].detach().double() - means[mean].to(sent[mean].device).double()
        about = sent[name].detach().double() + apart.square()
        wider[name] = about.clamp(max=torch.finfo(sent[name].dtype).max).to(sent[name].dtype)
    return wider


def others(sent: Parameters) -> Parameters:
    """Return what a client sent besides means and variances that belong together."""
    pairs = variances(sent)
    statistics = {*pairs, *pairs.values()}
    return {name: value for name, value in sent.items() if name not in statistics} if statistics else sent
