"""Single series of a root, found by their numbers and drawn: what a person looks at first."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.errors import InputError
from data.images import decode_image
from data.pages import LIGHT
from data.root import Root
from data.tar import GroupSample, read_shard

CELL = 72  # pixels, side of each image shown
GAP = 6
NAME_WIDTH = 92
SMALL = ImageFont.load_default(10)
TEXT = 30  # pixels below an image: alpha and weight, then the bar of the soft label
PAPER = "#ffffff"  # a picture of its own, which viewers show on any ground

HARD = 0.05  # of `entropy_share`: less is nearly hard


def some_of_all_pairs(root: Root, count: int = 10) -> list[int]:
    """Committed group numbers of as many sets of classes as possible, not chosen by look."""
    shards = list(root.entries())
    if not shards:
        raise InputError("url", root.url, "holds no finished series yet; run `semix resume`")
    groups = np.concatenate([np.asarray(entry.group_numbers) for entry in shards])
    return sorted(groups[spread_over_sets(groups % _sets(root), count)].tolist())


def spread_over_sets(sets: np.ndarray, count: int) -> list[int]:
    """Positions of up to `count` series: distinct sets of classes first, evenly among them.

    Args:
        sets: int [G], which classes each series mixes.
    """
    order = np.argsort(sets, kind="stable")
    _, starts, sizes = np.unique(sets[order], return_index=True, return_counts=True)
    if len(starts) >= count:
        # Later series of the later sets, so that they come from all parts of a dataset.
        return [
            int(order[starts[at] + turn * sizes[at] // count])
            for turn in range(count)
            for at in [(2 * turn + 1) * len(starts) // (2 * count)]
        ]
    before = np.arange(len(sets)) - np.repeat(starts, sizes)  # how often its set came already
    taken: list[int] = order[np.lexsort((order, before))][:count].tolist()
    return taken


def shard_of(root: Root, group: int) -> int:
    """The shard that a group belongs to, made or not. Raises InputError."""
    last = root.plan.num_groups - 1
    if not 0 <= group <= last:
        raise InputError("group", group, f"{root.url} has groups 0 to {last}")
    return root.layout.shard_of(group)


def read_series(root: Root, groups: Sequence[int]) -> list[GroupSample]:
    """The series of these groups, in their order; only their shards are read.

    Raises:
        InputError: a group that is in no committed shard, or was left out of its shard.
        ValueError: a shard is damaged.
    """
    wanted = set(groups)
    found: dict[int, GroupSample] = {}
    for shard in sorted({shard_of(root, group) for group in groups}):
        record = root.record(shard)
        if record is None:
            continue
        for series in record.left_out:
            if series.group in wanted:
                raise InputError("group", series.group, f"was left out: {series.reason}")
        samples = read_shard(root.store, record, num_classes=root.num_classes)
        found |= {s.record.group: s for s in samples if s.record.group in wanted}
    for group in groups:
        if group not in found:
            remedy = f"is not made yet; run `semix resume {root.url} --shards "
            raise InputError("group", group, f"{remedy}{shard_of(root, group)}`")
    return [found[group] for group in groups]


def entropy_share(samples: Sequence[GroupSample]) -> float:
    """Mean entropy of the labels of these series, in that of labels even over their classes."""
    shares = [
        -sum(p * math.log(p) for _, p in label if p > 0) / math.log(len(sample.record.classes))
        for sample in samples
        for label in sample.record.labels
    ]
    return sum(shares) / len(shares)


def contact_sheet(samples: Sequence[GroupSample]) -> Image.Image:
    """One row a series with its number, alpha growing to the right, a class name at either end.

    Below each image stand its alpha and its raw CLIP weight; the bar shows the soft label in
    the colours of the two names.
    """
    columns = max(len(sample.images) for sample in samples)
    width = 2 * NAME_WIDTH + columns * (CELL + GAP) + GAP
    row_height = CELL + TEXT + 2 * GAP
    sheet = Image.new("RGB", (width, row_height * len(samples) + GAP), PAPER)
    for row, sample in enumerate(samples):
        _draw_series(sheet, sample, top=GAP + row * row_height)
    return sheet


def _draw_series(sheet: Image.Image, sample: GroupSample, *, top: int) -> None:
    draw, record = ImageDraw.Draw(sheet), sample.record
    font = ImageFont.load_default(14)
    first, *others = record.names
    middle = top + CELL // 2
    order = sorted(range(len(sample.images)), key=lambda position: record.alphas[position])
    draw.text((NAME_WIDTH - GAP, middle), "\n".join(others), LIGHT.second, font, anchor="rm")
    number = (NAME_WIDTH - GAP, top + CELL + 3)
    draw.text(number, f"series {record.group}", LIGHT.muted, SMALL, anchor="rt")
    for column, position in enumerate(order):
        _draw_image(sheet, sample, position, (NAME_WIDTH + column * (CELL + GAP), top))
    end = NAME_WIDTH + len(order) * (CELL + GAP)
    draw.text((end, middle), first, LIGHT.first, font, anchor="lm")


def _draw_image(
    sheet: Image.Image, sample: GroupSample, position: int, corner: tuple[int, int]
) -> None:
    draw, record, (left, top) = ImageDraw.Draw(sheet), sample.record, corner
    image = Image.fromarray(decode_image(sample.images[position]), "RGB")
    sheet.paste(image.resize((CELL, CELL), Image.Resampling.BICUBIC), corner)
    text = f"{record.alphas[position]:.2f}  {record.weights[position]:.2f}"
    draw.text((left + CELL // 2, top + CELL + 3), text, LIGHT.ink, SMALL, anchor="mt")
    share = dict(record.labels[position])[record.classes[0]]
    split = left + CELL - round(CELL * share)
    bar = top + CELL + 18
    draw.rectangle((left, bar, left + CELL - 1, bar + 5), LIGHT.second)
    if split < left + CELL:
        draw.rectangle((split, bar, left + CELL - 1, bar + 5), LIGHT.first)


def _sets(root: Root) -> int:
    """After how many groups a plan begins anew with its first classes."""
    mixing = root.plan.config.get("mixing")
    turns = mixing.get("groups_per_pair") if isinstance(mixing, dict) else None
    if not isinstance(turns, int) or turns < 1:
        raise InputError("plan.json: config.mixing.groups_per_pair", turns, "is not what was built")
    return max(1, root.layout.stretches[0].groups // turns)
