"""Stratified splits that depend on a seed and the targets alone."""

import numpy as np


def stratified_split(
    targets: np.ndarray, sizes: tuple[int | None, int | None], *, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of train, validation and test, each sorted.

    Args:
        targets: int64 [N].
        sizes: training and validation images a class; None takes eight and one in ten.
    """
    parts: tuple[list, list, list] = ([], [], [])
    for target in np.unique(targets):
        # A generator of its own for each class: adding a class leaves the others' split alone.
        order = np.random.default_rng([seed, int(target)]).permutation(
            np.flatnonzero(targets == target)
        )
        train, validation = _sizes(len(order), sizes)
        for part, chosen in zip(parts, np.split(order, [train, train + validation]), strict=True):
            part.append(chosen)
    train_part, validation_part, test_part = (np.sort(np.concatenate(part)) for part in parts)
    return train_part, validation_part, test_part


def _sizes(count: int, sizes: tuple[int | None, int | None]) -> tuple[int, int]:
    train = max(1, count * 8 // 10) if sizes[0] is None else sizes[0]
    validation = max(1, count // 10) if sizes[1] is None else sizes[1]
    return train, validation
