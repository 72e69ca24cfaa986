"""The interface of a worker's jobs, and the job that makes the images of a root."""

import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from semix.data.formats import Failure
from semix.data.store import Store
from semix.pipeline.plan import Build
from semix.pipeline.prototypes import prepare

if TYPE_CHECKING:  # diffusers and open_clip cost seconds, and stored features need neither
    from semix.pipeline.shard import Models

HeartbeatCallback = Callable[[], None]
# Publishes a shard that was made, on any thread and without models; returns words for the log.
Publish = Callable[[], str]


class ShardJob(Protocol):
    """Shards to make, each from the content of the store alone, which also records those done."""

    @property
    def store(self) -> Store: ...

    @property
    def num_shards(self) -> int:
        """Number of shards of the whole plan."""

    def missing(self) -> Sequence[int]:
        """Numbers of the missing shards, ascending; there may be a million."""

    def is_done(self, shard: int) -> bool: ...

    def failed_attempts(self, missing: Sequence[int]) -> Mapping[int, int]:
        """Number of failed attempts by shard, for those of `missing` that have any."""

    def lease(self, shard: int) -> int | str:
        """Name of the lease that a worker holds while it makes this shard."""

    def load(self, *, device: str, heartbeat: HeartbeatCallback) -> None:
        """Load the models once, before any shard is claimed: their errors are no shard's fault.

        Args:
            heartbeat: called by the models whenever there was progress, now and in `make`.
        """

    def make(self, shard: int, *, heartbeat: HeartbeatCallback) -> Publish:
        """Make one shard; return the call that publishes and commits it."""

    def record_failure(self, failure: Failure) -> None: ...


class BuildJob:
    """Makes the images of a root from its plan."""

    def __init__(self, build: Build) -> None:
        self.build, self.root, self.plan = build, build.root, build.plan
        self.store = build.root.store
        self.models: Models | None = None

    @property
    def num_shards(self) -> int:
        return self.plan.num_shards

    def missing(self) -> Sequence[int]:
        return self.root.missing()

    def is_done(self, shard: int) -> bool:
        return self.root.is_committed(shard)

    def failed_attempts(self, missing: Sequence[int]) -> Mapping[int, int]:
        return self.root.failed_attempts(missing)

    def lease(self, shard: int) -> int:
        return shard

    def load(self, *, device: str, heartbeat: HeartbeatCallback) -> None:
        from semix.pipeline.shard import load_models

        prototypes = prepare(self.build, device=device, heartbeat=heartbeat)
        self.models = load_models(self.plan, prototypes, device=device, heartbeat=heartbeat)

    def make(self, shard: int, *, heartbeat: HeartbeatCallback) -> Publish:
        from semix.pipeline.shard import generate_shard

        assert self.models is not None, "load() comes first"
        made = generate_shard(
            self.plan.shard(shard),
            self.plan,
            models=self.models,
            root=self.root,
            heartbeat=heartbeat,
        )

        def publish() -> str:
            record = made.publish()
            return f"{record.groups} groups, {record.tar}"

        return publish

    def record_failure(self, failure: Failure) -> None:
        self.root.record_failure(failure)


def failure_of(shard: int, error: Exception) -> Failure:
    """Record the exception being handled, with its group where the message names one."""
    group = re.search(r"\bgroup (\d+)\b", str(error))
    return Failure(
        shard=shard,
        attempt=1,  # `record_failure` counts
        error=type(error).__name__,
        message=str(error),
        traceback=[line[:1000] for line in traceback.format_exc().splitlines()[-20:]],
        time=time.time(),
        group=int(group[1]) if group else None,
    )
