"""Square (Andriushchenko et al., 2020): random search by squares of pixels, which asks for scores and no gradients.

It starts with stripes of ±radius. Query i moves a square of side √(p_i·H·W) by ±2·radius in each channel, cut back to
the ball; the image stays so where that lowers the margin, the label's score less the best other one. The schedule of p
is pyautoattack's. Its own loop paints one square on a whole batch, so it is written anew here for rows of several
groups: each group has the squares that it would have alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedprophet.attacks.draws import GroupDraws

Margin = Callable[[Tensor, Tensor], Tensor]
"""Images, and the positions of their rows, to margins; a sample has fallen where its margin is 0 or less."""


def square(
    margin: Margin, x: Tensor, groups: Tensor, draws: GroupDraws, radius: float, queries: int, p: Callable[[int], float]
) -> Tensor:
    """Return the images (N×C×H×W) with the lowest margins found; `groups` are those of the rows."""
    channels, height, width = x.shape[1:]
    stripes = (2 * draws.of_rows(groups, (channels, 1, width)) - 1).sign()
    best = (x + radius * stripes).clamp(0.0, 1.0)
    least = margin(best, torch.arange(len(x), device=x.device))
    drawn = draws.of_groups((queries, 2 + channels)).to(x.device)
    left = (least > 0).nonzero().flatten()
    low, high, of_left = x[left] - radius, x[left] + radius, groups[left]
    for query in range(queries):
        if not len(left):
            break
        side = min(max(round(math.sqrt(p(query) * x[0].numel() / channels)), 1), height, width)
        painted = 2.0 * radius * _squares(drawn[:, query], side, height, width)
        tried = torch.clamp(torch.min(torch.max(best[left] + painted[of_left], low), high), 0.0, 1.0)
        found = margin(tried, left)
        better = (found < least[left]).nonzero().flatten()
        best[left[better]], least[left[better]] = tried[better], found[better]
        stands = found > 0
        if not bool(stands.all()):
            left, low, high, of_left = left[stands], low[stands], high[stands], of_left[stands]
    return best


def _squares(drawn: Tensor, side: int, height: int, width: int) -> Tensor:
    """Return for each group a picture that is ±1 within its square and 0 outside; `drawn` are a query's numbers."""
    top, edge = ((drawn[:, :2] * drawn.new_tensor([height - side, width - side])).long()).unbind(dim=1)
    rows, columns = (torch.arange(length, device=drawn.device) for length in (height, width))
    across = (rows >= top[:, None]) & (rows < top[:, None] + side)
    down = (columns >= edge[:, None]) & (columns < edge[:, None] + side)
    inside = across[:, None, :, None] & down[:, None, None, :]
    return inside * (2 * drawn[:, 2:, None, None] - 1).sign()
