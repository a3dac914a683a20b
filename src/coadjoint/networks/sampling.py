"""Sampling: tokens drawn from the distribution that a network gives them, truncated if asked for.

With pre-outputs a, p_k = exp(a_k / temperature) / sum_j exp(a_j / temperature). `top_k` keeps the k
most probable tokens, `top_p` the fewest most probable ones whose probabilities add up to top_p or
more; what is kept is scaled to sum 1. Of equally probable tokens the one with the lower number
counts as more probable. The order is temperature, top_k, top_p; the sums of top_p are those after
top_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import check_seed, real, whole_number


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature  below 1 sharpens the distribution, above 1 flattens it; 0 takes the most probable
                 token, and of equal ones that with the lowest number
    top_k        keep this many tokens; None keeps all
    top_p        keep the fewest tokens that have this probability together, the one that crosses
                 it among them; None keeps all

    Example:
        >>> import torch
        >>> from coadjoint.networks.sampling import Sampling
        >>> a = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
        >>> Sampling(top_p=0.6).probabilities(a)
        tensor([0.6250, 0.3750, 0.0000], dtype=torch.float64)
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        real("temperature", self.temperature, least=0)
        if self.top_k is not None:
            whole_number("top_k", self.top_k)
        if self.top_p is not None:
            real("top_p", self.top_p, least=0, most=1, above=True)

    def probabilities(self, a: Tensor) -> Tensor:
        """The probabilities [..., K] by which tokens are drawn, of pre-outputs a [..., K].

        They are in float64.
        """
        a = a.detach().double()
        if self.temperature == 0:
            best = a.sort(dim=-1, descending=True, stable=True).indices[..., :1]
            return torch.zeros_like(a).scatter_(-1, best, 1.0)
        # Without their maximum, so that a small temperature does not overflow.
        p = torch.softmax((a - a.amax(-1, keepdim=True)) / self.temperature, -1)
        if self.top_k is None and self.top_p is None:
            return p
        # A stable sort puts the lower of equally probable tokens first.
        ordered, tokens = p.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[..., self.top_k :] = 0
            ordered /= ordered.sum(-1, keepdim=True)
        if self.top_p is not None and self.top_p < 1:
            # A token is left out if those before it have that much together.
            enough = ordered.cumsum(-1)[..., :-1] >= self.top_p
            ordered[..., 1:][enough] = 0
            ordered /= ordered.sum(-1, keepdim=True)
        return torch.zeros_like(p).scatter_(-1, tokens, ordered)


class TokenDraws:
    """Tokens drawn for B samples, step by step.

    Each sample has random numbers of its own: what is drawn for it depends on the seed, on its
    number and on how often it was drawn for, and not on how many samples there are.
    """

    def __init__(self, sampling: Sampling, seed: int, samples: int) -> None:
        """seed: of all draws; samples: B."""
        check_seed(seed)
        self.sampling = sampling
        self.generators = []
        for number in range(samples):
            words = np.random.SeedSequence([seed, number])
            self.generators.append(np.random.Generator(np.random.PCG64(words)))

    def draw(self, a: Tensor, samples: Tensor) -> Tensor:
        """The tokens [m] of m samples, given by their numbers [m], with pre-outputs a [m, K].

        A token is the first k with p_0 + ... + p_k > r, where r is uniform on [0, 1).
        """
        p = self.sampling.probabilities(a)
        r = [self.generators[number].random() for number in samples.tolist()]
        total = p.cumsum(-1)
        # r times the last sum, which rounding leaves beside 1, is below it.
        bar = torch.tensor(r, dtype=p.dtype, device=p.device)[:, None] * total[:, -1:]
        drawn = (total <= bar).sum(-1)
        # Rounding aside, a token of probability 0 is never the first above the bar.
        last = p.shape[-1] - 1 - (p.flip(-1) > 0).to(torch.int8).argmax(-1)
        return torch.minimum(drawn, last)
