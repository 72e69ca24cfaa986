"""One series of a root made anew, in the very batch that it belongs to."""

import numpy as np

from data.errors import InputError
from data.images import decode_image
from data.root import PROTOTYPES, Root
from data.shards import GroupSample
from pipeline.batch import encode_series, make_batch
from pipeline.build import group_record, load_models
from pipeline.plan import BuildPlan, MixGroup
from pipeline.root import plan_of
from pipeline.stopwatch import Stopwatch


def regenerate(root: Root, group: int, *, device: str = "auto") -> GroupSample:
    """Make a series with the plan's models; nothing is written to the store.

    The batch is part of what a series is, since its layout moves the last bits: the whole batch
    is made.

    Raises:
        InputError: the root lacks prototypes; a model cannot be used.
    """
    plan = plan_of(root)
    if not root.store.exists(PROTOTYPES):  # a build measures them, a look does not
        shard = plan.layout.shard_of(group)
        remedy = f"needs {PROTOTYPES}; run `semix resume {root.url} --shards {shard}` first"
        raise InputError("group", group, remedy)
    groups = batch_of(plan, group)
    models = load_models(root, plan, device=device)
    batch = make_batch(groups, plan, models=models, clock=Stopwatch())
    row = group - groups[0].index
    extension = plan.config.shards.image_format
    labels = batch.annotation(row, models.annotator)
    record = group_record(groups[row], plan, labels=labels, noise=batch.noise[row])
    encoded = batch.encoded[row] if batch.encoded else encode_series(batch.images[row], extension)
    return GroupSample(record, list(encoded), extension)


def batch_of(plan: BuildPlan, group: int) -> list[MixGroup]:
    """The groups that are generated together with this one."""
    spec = plan.shard(plan.layout.shard_of(group))
    size = plan.config.shards.groups_per_batch
    start = group - (group - spec.start) % size
    return [plan.group(index) for index in range(start, min(start + size, spec.stop))]


def same_pixels(one: GroupSample, other: GroupSample) -> bool:
    """Whether two series show exactly the same images."""
    if len(one.images) != len(other.images):
        return False
    pairs = zip(one.images, other.images, strict=True)
    return all(np.array_equal(decode_image(a), decode_image(b)) for a, b in pairs)
