"""The order of a stream's samples, and how far it is in it: what training saves to go on mid-epoch.

The order follows from the index, seed, epoch, ranks and workers, so a position is a few counts for
each worker, and nothing of the shuffle buffer is saved.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from webdataset.utils import pytorch_worker_info

from semix.data.errors import InputError
from semix.data.fingerprint import derived_seed
from semix.data.settings import Settings, load_settings

# Columns of a cursor; the last three are the position of the worker.
EPOCH, WORKER, NUM_WORKERS, POSITION = 0, 1, 2, slice(3, 6)
SHARED_EPOCH, WORKERS_READ = 0, 1


class Position(NamedTuple):
    """How far one worker is.

    Attributes:
        passes: passes over its shards that are complete.
        samples: samples of the current pass that it gave.
        outputs: what came out of the composed pipeline since the iteration began: samples, or
            batches after `batched`; `with_epoch` counts these.
    """

    passes: int = 0
    samples: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class StreamIdentity:
    """What the order of a stream follows from, besides epoch, ranks and workers."""

    index: str
    digest: str  # of the index
    seed: int
    shuffle: int
    series: bool
    exclude: str  # digest of the rules, the flags and the labels that they look at


class StreamState(Settings):
    """A saved state, as JSON can hold it."""

    index: str
    digest: str
    seed: int
    shuffle: int
    series: bool
    exclude: str
    epoch: int
    rank: int
    ranks: int
    num_workers: int
    workers: dict[str, tuple[int, int, int]]


class StreamOrder:
    """The random numbers of a stream, and its position, in this process and those of its workers.

    Attributes:
        number: number of the current pass over the shards.
        skip: samples of this pass that were given before the state that was loaded.
    """

    def __init__(self, identity: StreamIdentity, epoch: int) -> None:
        self.identity, self.number, self.skip = identity, 0, 0
        # Forked and spawned workers share it: the epoch, and whether such a worker reads.
        self._shared = torch.tensor([epoch, 0]).share_memory_()
        self._own = Position()
        self._consumed: dict[int, Position] | None = None
        self._num_workers = 1  # of the consumed samples
        self._loaded: StreamState | None = None
        self._taken = torch.zeros(0, dtype=torch.bool)  # workers that began where it ends

    @property
    def epoch(self) -> int:
        return int(self._shared[SHARED_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Another epoch begins at its start; the current one keeps its position."""
        if epoch != self.epoch:
            self._own, self._consumed, self._loaded = Position(), None, None
            self._shared.copy_(torch.tensor([epoch, 0]))

    def rng(self, *parts: int | str) -> random.Random:
        return random.Random(derived_seed(self.identity.seed, self.epoch, self.number, *parts))

    def begin(self) -> Position:
        """Where this process begins an iteration: at a loaded state once, else at the start.

        Raises:
            InputError: the loaded state is of another number of workers.
        """
        _, _, worker, num_workers = pytorch_worker_info()
        self._shared[WORKERS_READ] = get_worker_info() is not None
        self._own = Position()
        if self._loaded is not None and self._loaded.epoch == self.epoch:
            self._own = self._take_position(self._loaded, worker, num_workers)
        return self._own

    def _take_position(self, loaded: StreamState, worker: int, num_workers: int) -> Position:
        if loaded.num_workers != num_workers and any(map(any, loaded.workers.values())):
            remedy = f"the state is of {loaded.num_workers} workers; go on with as many"
            raise InputError("num_workers", num_workers, remedy)
        if worker >= len(self._taken) or self._taken[worker]:
            return Position()
        self._taken[worker] = True
        return Position(*loaded.workers.get(str(worker), ()))

    def start_pass(self, number: int, skip: int) -> None:
        self.number, self.skip = number, skip
        self._own = self._own._replace(passes=number, samples=skip)

    def advance(self) -> np.ndarray:
        """Count one more sample. Returns its cursor, int64 [6]."""
        _, _, worker, num_workers = pytorch_worker_info()
        self._own = self._own._replace(samples=self._own.samples + 1)
        return np.array([self.epoch, worker, num_workers, *self._own])

    def count_output(self) -> None:
        self._own = self._own._replace(outputs=self._own.outputs + 1)

    def consume(self, cursors: Tensor | np.ndarray) -> None:
        """Note that samples were used, by their cursors, int64 [..., 6]."""
        rows = np.asarray(cursors).reshape(-1, POSITION.stop)
        epoch, num_workers = (int(rows[-1, column]) for column in (EPOCH, NUM_WORKERS))
        for worker in np.unique(rows[:, WORKER]).tolist():
            positions = sorted(map(tuple, rows[rows[:, WORKER] == worker, POSITION].tolist()))
            before = self._consumed_before(epoch)
            if positions[0] <= before.get(worker, ()):  # the iteration began again
                before = {}
            passes, samples, outputs = positions[-1]
            self._consumed = before | {worker: Position(passes, samples, outputs + 1)}
        self._num_workers = num_workers

    def _consumed_before(self, epoch: int) -> dict[int, Position]:
        if epoch != self.epoch:
            raise InputError("cursor", f"of epoch {epoch}", f"the stream is at epoch {self.epoch}")
        if self._consumed is None and self._loaded is not None:
            return _positions(self._loaded)
        return self._consumed or {}

    def state(self) -> dict[str, Any]:
        rank, ranks, worker, num_workers = pytorch_worker_info()
        is_worker = get_worker_info() is not None
        if self._consumed is not None and not is_worker:
            num_workers, positions = self._num_workers, self._consumed
        elif self._loaded is not None and not self._taken.any():
            num_workers, positions = self._loaded.num_workers, _positions(self._loaded)
        elif self._shared[WORKERS_READ] and not is_worker:
            remedy = (
                'they read ahead of you: pass each batch\'s "cursor" to `consumed`, or save the '
                "state_dict of a torchdata StatefulDataLoader instead"
            )
            raise InputError("state_dict", "of a stream that a DataLoader's workers read", remedy)
        else:
            positions = {worker: self._own}
        workers = {str(number): list(position) for number, position in positions.items()}
        counts = {"rank": rank, "ranks": ranks, "num_workers": num_workers, "workers": workers}
        return asdict(self.identity) | {"epoch": self.epoch} | counts

    def load(self, values: Mapping[str, Any]) -> None:
        """Let the next iteration begin where a state ends, in the state's epoch.

        Raises:
            InputError: no state of a stream, or that of another one.
        """
        state = load_settings(StreamState, values)
        rank, ranks, _, _ = pytorch_worker_info()
        if state.digest != self.identity.digest:
            remedy = f"the state is of {state.index} of another root, or of another index"
            raise InputError("index", self.identity.index, f"{remedy}; open the one it is of")
        current = asdict(self.identity) | {"rank": rank, "ranks": ranks}
        for field in ("seed", "shuffle", "series", "ranks", "rank", "exclude"):
            if current[field] != (saved := getattr(state, field)):
                raise InputError(field, current[field], _REMEDIES.get(field, "").format(saved))
        self.set_epoch(state.epoch)
        self._own, self._consumed, self._loaded = Position(), None, state
        self._shared[WORKERS_READ] = False
        self._taken = torch.zeros(max(1, state.num_workers), dtype=torch.bool).share_memory_()


_REMEDIES = {
    field: f"the state is of {field} {{}}; go on with that"
    for field in ("seed", "shuffle", "series")
} | {
    "ranks": "the state is of {} ranks; go on with as many",
    "rank": "the state is of rank {}; save and load one for each rank",
    "exclude": "the state is of other rules, flags or labels ({}); go on with those",
}


def _positions(state: StreamState) -> dict[int, Position]:
    return {int(worker): Position(*counts) for worker, counts in state.workers.items()}
