"""The shards a lost worker was making: written down as failed, so that others come first."""

import re
import time

from data.formats import Failure
from data.label_sets import LabelSet
from data.leases import held_by, lease_name
from data.root import Root
from flows.supervise import Outcome

SHARD = re.compile(r"(?:labels-[0-9a-f]{12}-)?(\d{7})")  # as `pipeline.work` names what it claims


def record_lost(url: str, outcome: Outcome, *, labels: str = "", told: bool = False) -> list[int]:
    """Write down what a worker of this machine left unmade when it ended, and free its leases.

    A worker that is killed writes nothing itself, and the next one would begin with the same shard.

    Args:
        labels: it made the labels of this set, not images.
        told: it wrote down itself what failed; its leases alone are left.
    Returns:
        The shards.
    """
    root = Root(url)
    place = LabelSet(root, labels) if labels else root
    held = held_by(root.store, outcome.pid)
    found = [SHARD.fullmatch(work) for work in held] if held and not told else []
    missing = frozenset(place.missing() if any(found) else ())
    shards = [shard for match in found if match and (shard := int(match[1])) in missing]
    for shard in shards:
        place.record_failure(
            Failure(
                shard=shard, attempt=1, error="WorkerLost", message=str(outcome), time=time.time()
            )
        )
    for work in held_by(root.store, outcome.pid) if held else []:  # what nobody has taken over
        root.store.delete(lease_name(work))
    return shards
