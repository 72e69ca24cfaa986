"""In which order an epoch shows its samples, and which of them a rank sees in a step."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from data.fingerprint import derived_seed

Last = Literal["short", "drop", "repeat"]


def generator_for(*parts: int | str) -> torch.Generator:
    """Random numbers for one purpose, by hashing: those of one epoch say nothing of the next."""
    return torch.Generator().manual_seed(derived_seed(*parts))


def epoch_order(shard_sizes: Sequence[int], *, seed: int, epoch: int, window: int) -> np.ndarray:
    """Every sample once: shards in random order, samples at random within a few shards.

    A reader then needs only `window` shards at a time.

    Args:
        shard_sizes: samples of each shard; samples are numbered through the shards.
        window: shards whose samples are mixed with each other.
    Returns:
        int64 [N], a function of the arguments alone.
    """
    rng = generator_for("order", seed, epoch)
    starts = np.concatenate([[0], np.cumsum(shard_sizes)])
    shards = torch.randperm(len(shard_sizes), generator=rng).tolist()
    parts = []
    for first in range(0, len(shards), window):
        some = [np.arange(starts[s], starts[s + 1]) for s in shards[first : first + window]]
        together = np.concatenate(some)
        parts.append(together[torch.randperm(len(together), generator=rng).numpy()])
    return np.concatenate(parts)


def num_steps(samples: int, batch_size: int, last: Last) -> int:
    return samples // batch_size if last == "drop" else -(-samples // batch_size)


def share_of_step(
    order: np.ndarray, step: int, *, batch_size: int, rank: int, ranks: int, last: Last
) -> tuple[np.ndarray, int]:
    """What one rank sees in a step: as many samples as every other rank.

    A step has the samples [step B, (step + 1) B) of the order, and a rank its slice of them.
    What the last step lacks is filled up with samples of the epoch's beginning, with `short`
    only so far that all ranks have equally many, with `repeat` to a whole batch.

    Args:
        batch_size: B, over all ranks, a multiple of `ranks`.
    Returns:
        samples, int64 [b]; and how many of them, the first ones, are no repeats.
    """
    start = step * batch_size
    real = min(batch_size, len(order) - start)
    own = batch_size // ranks if last == "repeat" else -(-real // ranks)
    # As even as it can be: the first ranks have one more.
    counts = np.full(ranks, real // ranks) + (np.arange(ranks) < real % ranks)
    if last == "repeat":
        counts = np.clip(real - np.arange(ranks) * own, 0, own)
    first = start + int(counts[:rank].sum())
    count = int(counts[rank])
    repeats = (np.arange(own - count) + rank * own) % len(order)
    return np.concatenate([order[first : first + count], order[repeats]]), count
