"""Labelling the images of a root anew, as work for a worker."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from data.errors import InputError
from data.label_sets import LabelSet
from pipeline.annotate import Annotator
from pipeline.annotation.annotator import build_annotator
from pipeline.config import AnnotationConfig
from pipeline.plan import BuildPlan
from pipeline.relabel.sets import IMAGES, annotation_of, encoders_of, prototypes_name
from pipeline.relabel.shard import label_shard
from pipeline.root import plan_of
from pipeline.work import Beat, Making


class Relabelling:
    """One label set of a root; its prototypes are measured already."""

    def __init__(self, labels: LabelSet) -> None:
        self.labels = labels
        self.store = labels.store
        self.annotator: Annotator | None = None

    @cached_property
    def plan(self) -> BuildPlan:
        return plan_of(self.labels.root)

    @property
    def num_shards(self) -> int:
        return int(self.labels.root.plan["num_shards"])

    def missing(self) -> Sequence[int]:
        return self.labels.missing()

    def is_done(self, shard: int) -> bool:
        """Also true where the images are gone since our look: there is nothing to label."""
        record = self.labels.root.record(shard)
        return record is None or self.labels.is_committed(shard, record["sha256"])

    def failures(self) -> Mapping[int, Sequence[Mapping[str, Any]]]:
        return self.labels.failures()

    def lease(self, shard: int) -> str:
        return f"labels-{self.labels.digest[:12]}-{shard:07d}"

    def load(self, *, device: str, beat: Beat) -> None:
        config = annotation_of(self.labels)
        if self.labels.plan["features"] == IMAGES:
            self._refuse_other_encoders(config)
        prototypes = self.store.get(prototypes_name(self.labels))
        self.annotator = build_annotator(config, prototypes, device=device)

    def make(self, shard: int, *, beat: Beat) -> Making[str]:
        assert self.annotator is not None, "load() comes first"
        record = self.labels.root.record(shard)
        if record is None:
            return "its images are gone; they are made again first"
        yield from label_shard(
            record, labels=self.labels, plan=self.plan, annotator=self.annotator, beat=beat
        )
        return f"{record['groups']} groups labelled"

    def record_failure(self, shard: int, error: dict[str, Any]) -> None:
        self.labels.record_failure(shard, error)

    def _refuse_other_encoders(self, config: AnnotationConfig) -> None:
        if encoders_of(self.labels.root, config) != self.labels.plan["encoders"]:
            remedy = "its files are not those that this label set was started with"
            raise InputError("annotation.model", config.model, remedy)
