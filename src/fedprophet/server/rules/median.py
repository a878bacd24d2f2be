"""Coordinate-wise median (Yin et al., 2018)."""

from collections.abc import Iterable

from torch import Tensor

from fedprophet.server.rules.registry import Parameters, Update, rule
from fedprophet.server.rules.robust import join_each, middle, voted_mean


@rule(
    "median", "each coordinate's median; all clients count alike", averaged="median over the clients that have trained"
)
def median(current: Parameters, updates: Iterable[Update]) -> dict[str, Tensor]:
    """Return each coordinate's median: of an even number of values the mean of the middle two.

    All clients count alike. Values of fewer than three clients are clipped and averaged, as in `trimmed_mean`.
    """
    return join_each(current, updates, lambda base, sent: voted_mean(base, sent, middle))
