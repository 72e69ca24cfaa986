"""Pairs of classes drawn by how similar their prototypes are."""

import torch
from torch import Tensor


def similar_pairs(
    prototypes: Tensor, count: int, *, temperature: float, seed: int
) -> list[tuple[int, int]]:
    """Draw `count` different pairs with odds exp(cosine / temperature), in ascending order.

    Adding Gumbel noise to the log-odds and keeping the largest draws without replacement
    (Efraimidis and Spirakis 2006). Memory is that of one row of pairs and of the result.

    Args:
        prototypes: [K, D]; count: at most K (K - 1) / 2.
    """
    unit = torch.nn.functional.normalize(prototypes.double(), dim=1)
    rng = torch.Generator().manual_seed(seed)
    keys, pairs = torch.empty(0, dtype=torch.float64), torch.empty(0, 2, dtype=torch.int64)
    for first in range(len(unit) - 1):
        cosine = unit[first + 1 :] @ unit[first]
        uniform = torch.rand(len(cosine), generator=rng, dtype=torch.float64)
        gumbel = -(-uniform.clamp(min=1e-300).log()).log()
        second = torch.arange(first + 1, len(unit))
        keys = torch.cat([keys, cosine / temperature + gumbel])
        pairs = torch.cat([pairs, torch.stack([torch.full_like(second, first), second], 1)])
        if len(keys) > count:
            keys, best = keys.topk(count)
            pairs = pairs[best]
    return sorted((first, second) for first, second in pairs.tolist())
