"""Series generated again from the plan, and how far their pixels are from the stored ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from semix.data.contact_sheet import read_series
from semix.data.device import device_name
from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES
from semix.data.root import Root
from semix.data.tar import GroupSample
from semix.pipeline.plan import BuildPlan, build_of
from semix.pipeline.provenance import library_versions
from semix.pipeline.shard import Models, batches, load_models, make_batch, series_record
from semix.pipeline.shard_writer import Stopwatch


@dataclass(frozen=True)
class SeriesComparison:
    """A stored series beside the same one, generated again.

    Attributes:
        differing_images: how many of its images differ in some pixel.
        max_difference: of a channel of a pixel, 0 to 255.
        changes: name, then value when it was made and now, of every library version and of the
            device that differ.
    """

    shard: int
    group: int
    images: int
    differing_images: int
    max_difference: int
    changes: dict[str, tuple[str, str]]

    @property
    def same(self) -> bool:
        return not self.differing_images

    def __str__(self) -> str:
        if self.same:
            return f"group {self.group}: regenerated pixels equal the stored ones"
        count = f"{self.differing_images} of {self.images} images"
        text = f"group {self.group}: {count} differ by up to {self.max_difference} of 255"
        values = (f"{name} {then}, now {now}" for name, (then, now) in self.changes.items())
        return f"{text}; made with {'; '.join(values) or 'the same versions and device'}"


def regenerate(root: Root, group: int, *, device: str = "auto") -> GroupSample:
    """Generate one series again, in its original batch; nothing is written.

    Raises:
        InputError: the root lacks prototypes; a model cannot be used; the series cannot be stored.
    """
    plan = build_of(root).plan
    prototypes = _prototypes(root, "group", group, plan.layout.shard_of(group))
    return _regenerated(plan, load_models(plan, prototypes, device=device), group)


def compare(root: Root, count: int, *, device: str = "auto") -> Iterator[SeriesComparison]:
    """Generate the first series of `count` committed shards again, spread over the root.

    Raises:
        InputError: as `regenerate`; no shard is committed.
    """
    done = root.done()
    if not done:
        raise InputError("regenerate", count, f"{root.url} has no shard yet")
    shards = sorted({done[round(i)] for i in np.linspace(0, len(done) - 1, count)})
    plan = build_of(root).plan
    prototypes = _prototypes(root, "regenerate", count, shards[0])
    models = load_models(plan, prototypes, device=device)
    now = library_versions() | {"device": device_name(models.generator.device)}
    for shard in shards:
        record = root.record(shard)
        if record is None:  # discarded meanwhile
            continue
        group = record.group_numbers[0]
        (stored,) = read_series(root, [group])
        differences = _differences(stored, _regenerated(plan, models, group))
        changes = {
            name: (then, now.get(name, "none"))
            for name, then in sorted(record.versions.items())
            if then != now.get(name)
        }
        num_differing = sum(difference > 0 for difference in differences)
        sizes = len(differences), num_differing, max(differences)
        yield SeriesComparison(shard, group, *sizes, changes)


def same_pixels(first: GroupSample, second: GroupSample) -> bool:
    """Whether two series show exactly the same images."""
    return len(first.images) == len(second.images) and not any(_differences(first, second))


def _differences(first: GroupSample, second: GroupSample) -> list[int]:
    """The largest difference of a channel in each image; 255 for series of different sizes."""
    pixels = [sample.pixels().astype(np.int16) for sample in (first, second)]
    if pixels[0].shape != pixels[1].shape:
        return [255] * len(first.images)
    maxima: list[int] = np.abs(pixels[0] - pixels[1]).max(axis=(1, 2, 3)).tolist()
    return maxima


def _prototypes(root: Root, field: str, value: object, shard: int) -> bytes:
    """Content of the prototypes file, which only a build measures."""
    try:
        return root.store.get(PROTOTYPES)
    except FileNotFoundError:
        remedy = f"needs {PROTOTYPES}; run `semix resume {root.url} --shards {shard}` first"
        raise InputError(field, value, remedy) from None


def _regenerated(plan: BuildPlan, models: Models, group: int) -> GroupSample:
    spec = plan.shard(plan.layout.shard_of(group))
    groups = next(batch for batch in batches(spec, plan) if batch[-1].index >= group)
    batch = make_batch(groups, plan, models=models, clock=Stopwatch())
    row, settings = group - groups[0].index, plan.config.shards
    if row in batch.faults:
        raise InputError("group", group, f"cannot be stored: {batch.faults[row]}")
    labels = batch.labels(models.annotator)[batch.storable.index(row)]
    record = series_record(groups[row], plan, labels=labels, noise=batch.noise[row])
    return GroupSample(record, batch.encoding(row, settings)(), settings.image_format)
