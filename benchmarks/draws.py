"""C6: class-indexed draws of groups against drawing until a group fits."""

import itertools
import random

import torch
from torch import Tensor

from benchmarks.measure import Result, interleaved, ratio, slope
from semix.data.dataset import ClassIndex

CLASSES = {10: 5.0, 100: 40.0, 200: 80.0}  # number of classes -> ratio to reach
BATCH = 128
BATCHES = {"ours": 200, "rejection": 4}  # per turn, so many that a turn is long enough to be timed
CHECKED = 20_000  # draws that are counted by group


def run() -> Result:
    result = Result(
        "C6", "a group with the class of each of 128 real images, every pair of classes"
    )
    our_seconds = []
    for count, bar in CLASSES.items():
        pairs = list(itertools.combinations(range(count), 2))
        index = ClassIndex(torch.tensor(pairs), count)
        check(result, pairs, index, count)
        targets = torch.randint(count, (BATCH,), generator=torch.Generator().manual_seed(0))
        seconds = per_batch(pairs, index, targets)
        speedup = ratio(seconds["rejection"], seconds["ours"])
        result.at_least(f"{count} classes, ratio to rejection", speedup["ratio"], bar)
        microseconds = {name: min(s) / BATCH * 1e6 for name, s in seconds.items()}
        result.figures[f"{count} classes"] = speedup | {"microseconds_a_draw": microseconds}
        our_seconds.append(seconds["ours"])
    class_slope = slope(list(CLASSES), our_seconds)
    result.at_most("slope of seconds in classes", class_slope["slope"], 0.1)
    result.figures["slope"] = class_slope
    return result


def per_batch(
    pairs: list[tuple[int, int]], index: ClassIndex, targets: Tensor
) -> dict[str, list[float]]:
    """CPU seconds of drawing for one batch."""
    rng, python_rng = torch.Generator().manual_seed(0), random.Random(0)
    classes = targets.tolist()
    sides = {
        "ours": lambda: [index.draw(targets, rng) for _ in range(BATCHES["ours"])],
        "rejection": lambda: [
            rejection(pairs, classes, python_rng) for _ in range(BATCHES["rejection"])
        ],
    }
    seconds = interleaved(sides, repeats=9)
    return {name: [s / BATCHES[name] for s in times] for name, times in seconds.items()}


def rejection(pairs: list[tuple[int, int]], targets: list[int], rng: random.Random) -> list[int]:
    """CSM's loader: for each real image random groups until one contains its class."""
    groups = []
    for target in targets:
        while True:
            group = rng.randrange(len(pairs))
            if target in pairs[group]:
                break
        groups.append(group)
    return groups


def check(result: Result, pairs: list[tuple[int, int]], index: ClassIndex, count: int) -> None:
    """Check that both sides draw all groups that contain a class equally often."""
    target = count // 3
    indexed = index.draw(torch.full((CHECKED,), target), torch.Generator().manual_seed(1)).tolist()
    rejection_groups = rejection(pairs, [target] * CHECKED, random.Random(1))
    matching = {group for group, pair in enumerate(pairs) if target in pair}
    for side, groups in (("ours", indexed), ("rejection", rejection_groups)):
        fractions = torch.bincount(torch.tensor(groups), minlength=len(pairs)) / CHECKED
        expected = 1 / len(matching)
        deviation = max(abs(float(fractions[group]) - expected) for group in matching)
        is_uniform = deviation < 6 * (expected / CHECKED) ** 0.5  # six standard deviations
        name = f"{count} classes: {side} draws its groups alike"
        result.equal(name, set(groups) == matching and is_uniform, True)
