"""Label all shards from stored features, on threads of this process: no CLIP, no pixels."""

from collections.abc import Callable, Iterable

from data.errors import InputError
from data.label_sets import LabelSet
from data.threads import mapped
from pipeline.relabel.relabelling import Relabelling
from pipeline.work import failure_note, finish

THREADS = 8  # they wait for the store most of the time


def label_stored(
    labels: LabelSet, shards: Iterable[int], *, made: Callable[[int], None] = lambda shard: None
) -> None:
    """Label these shards; one that fails is recorded and stops no other.

    Nothing is claimed: a shard takes milliseconds, and two that make the same labels publish
    the same bytes.

    Args:
        made: called here, with the number of each shard that was tried.
    """
    work = Relabelling(labels)
    work.load(device="cpu", beat=lambda: None)

    def label(shard: int) -> int:
        try:
            finish(work.make(shard, beat=lambda: None))
        except InputError:
            raise
        except Exception as error:
            work.record_failure(shard, failure_note(error))
        return shard

    for shard in mapped(label, shards, threads=THREADS):
        made(shard)
