"""Bake labels into a new root: the same images byte for byte, and other labels in each KEY.json."""

from collections.abc import Iterator

from semix.data.errors import InputError
from semix.data.features import stored_features
from semix.data.formats import PLAN, PROTOTYPES, CommitRecord, Plan, shard_stem
from semix.data.label_sets import LabelSet, features_file
from semix.data.layout import write_extension
from semix.data.root import Root
from semix.data.store import Store
from semix.data.tar import GroupSample, write_tar
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan
from semix.pipeline.provenance import labelling_encoders
from semix.pipeline.relabel import series_of
from semix.pipeline.shard_writer import Stopwatch, publish_shard


def open_baked(source: Root, config: BuildConfig, labels: LabelSet | None, url: str) -> Root:
    """Start the new root, or open it to continue.

    Its plan is the source's plan with this annotation, so that it is a root like any other, and
    records what it was baked from. plan.json is written after the prototypes, which must be the
    source's and not measured again.

    Args:
        config: the source's, with the annotation of `labels`.
    Raises:
        InputError: the place is the source itself, holds something else, or cannot be written.
    """
    store = Store(url)
    if store.url == source.url:
        raise InputError("out", url, "is the root itself; choose a new place")
    plan = _plan(source, config, labels)
    if store.exists(PLAN):
        _refuse_difference(Root(url), plan)
    else:
        store.check_writable()
        # May overwrite a file that a killed bake left; there is no plan yet.
        store.put(PROTOTYPES, _prototypes(source, labels))
        if not store.create(PLAN, plan.written()):
            return open_baked(source, config, labels, url)  # another process was first
    for number, extension in enumerate(source.extensions, start=1):
        write_extension(store, number, extension.model_copy(update={"plan": plan.digest}))
    return Root(url)


def bake_shard(
    shard: int,
    *,
    source: Root,
    labels: LabelSet | None,
    target: Root,
    plan: BuildPlan,
    prototypes: str,
) -> bool:
    """Copy one shard with other labels and commit it; return False if the source lacks it.

    One series is in memory at a time.

    Args:
        labels: of the source; None for the labels in its shards.
        plan: of the source.
        prototypes: SHA-256 of the prototypes file of the new root.
    Raises:
        ValueError: the record, the tar, the features or the labels are damaged, or not as recorded.
    """
    record = source.record(shard)
    if record is None:
        return False
    clock = Stopwatch()
    with target.store.staging(f"{shard_stem(shard)}.tar") as staged:
        with clock.stage("write"), staged.open("wb") as file:
            write_tar(file, _series(record, source=source, labels=labels, plan=plan))
        publish_shard(
            target,
            shard,
            staged,
            stored_features(source.store, features_file(record, labels)),
            clock=clock,
            groups=record.groups,
            first=record.first,
            wall_seconds=clock.wall,
            versions=record.versions,  # of the libraries that made the images
            left_out=record.left_out,
            prototypes=prototypes,
        )
    return True


def _plan(source: Root, config: BuildConfig, labels: LabelSet | None) -> Plan:
    written = source.stored_plan  # plan.json itself, without extensions
    models = written.models
    if labels is not None:
        models = {**models, "annotation": labelling_encoders(labels.record)}
    plan = BuildPlan(
        config,
        tuple(written.class_names),
        models=models,
        similar=written.pairs,
        by_run=written.by_run,
    )
    return written.model_copy(
        update={
            "digest": plan.digest,
            "normalize": config.annotation.normalize,
            "config": config.model_dump(mode="json"),
            "models": models,
            "baked_from": {"plan": written.digest, "labels": labels.digest if labels else None},
        }
    )


def _prototypes(source: Root, labels: LabelSet | None) -> bytes:
    try:
        return source.store.get(PROTOTYPES if labels is None else labels.prototypes)
    except FileNotFoundError as error:
        remedy = f"holds no {error.filename or PROTOTYPES}; run `semix resume` first"
        raise InputError("url", source.url, remedy) from None


def _refuse_difference(target: Root, plan: Plan) -> None:
    written = target.stored_plan
    if (written.digest, written.baked_from) != (plan.digest, plan.baked_from):
        remedy = "holds another dataset, or another baked one; choose a new place"
        raise InputError("out", target.url, remedy)


def _series(
    record: CommitRecord, *, source: Root, labels: LabelSet | None, plan: BuildPlan
) -> Iterator[GroupSample]:
    groups = [plan.group(index) for index in record.group_numbers]
    new_labels = labels.labels(record.shard, images=record.sha256) if labels else None
    for sample in series_of(source.store, record, groups):
        series = sample.record
        if new_labels is not None:
            series = series.with_labels(new_labels[series.group])
        yield GroupSample(series, sample.images, sample.extension)
