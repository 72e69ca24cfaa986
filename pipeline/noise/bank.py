"""Chosen noises that are kept in the root, so that all workers use the same ones."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from safetensors.torch import save
from torch import Tensor

from data.errors import InputError
from data.leases import Renewing, claim, release
from data.store import Store
from data.strict_json import read_object
from data.tensors import MOST_HEADER, read_tensors
from pipeline.noise.initial import initial_noise

WAIT = 0.5  # seconds between looks at what another worker is choosing
CACHED = 16  # parts; memory must not grow with the number of pairs


@dataclass(frozen=True)
class Part:
    """What one choice gave.

    Attributes:
        facts: plain values: `entries`, one for each noise that is kept, the most stable first;
            `common`, what their records share; and how the choice came about.
        tensors: float16 [n, C, h, w] where the noises are optimised; others follow from `seed`.
    """

    facts: dict[str, Any]
    tensors: Tensor | None = None

    def __len__(self) -> int:
        return len(self.facts["entries"])

    def record(self, entry: int) -> dict[str, Any]:
        """The `noise` part of the record of a series that uses this noise."""
        return {**self.facts["common"], **self.facts["entries"][entry]}

    def noise(self, entry: int, shape: Sequence[int]) -> Tensor:
        """float32 [C, h, w]."""
        if self.tensors is not None:
            return self.tensors[entry].float()
        return initial_noise([self.record(entry)["seed"]], shape)[0]


def noise_digest(noise: Tensor) -> str:
    """sha256 of the float32 values."""
    return hashlib.sha256(noise.cpu().contiguous().numpy().tobytes()).hexdigest()


class Bank:
    """Parts by number (None: the run's one), each chosen once by the worker that needs it first.

    Args:
        plan_digest: of the plan that the root belongs to.
        choose: makes a part, from the plan and the part's number alone; it beats `beat`, for
            that may take longer than a lease is believed.
        beat: called while another worker is waited for; renews a part's lease besides.
    """

    def __init__(
        self,
        store: Store,
        plan_digest: str,
        *,
        choose: Callable[[int | None], Part],
        beat: Renewing | None = None,
    ) -> None:
        self._store = store
        self._plan = plan_digest
        self._choose = choose
        self._beat = beat or Renewing(store)
        self.part = lru_cache(CACHED)(self._ensure)

    def _ensure(self, number: int | None) -> Part:
        """What is stored, by us or by another worker: it decides, down to the last bit."""
        name = part_name(number)
        lease = name.removesuffix(".safetensors").replace("/", "-")
        while not self._store.exists(name):
            if not claim(self._store, lease):
                self._beat()
                time.sleep(WAIT)
                continue
            try:
                if not self._store.exists(name):  # published between our look and our claim
                    with self._beat.holding(lease):
                        part = self._choose(number)
                    self._store.create(name, packed(part, self._plan))
            finally:
                release(self._store, lease)
        return self._read(name)

    def _read(self, name: str) -> Part:
        where = f"{self._store.url}/{name}"
        try:
            part, plan = unpacked(self._store.get(name))
        except (ValueError, KeyError) as error:
            remedy = "remove it, and the noise is chosen again"
            raise InputError(where, "damaged", remedy) from error
        if plan != self._plan:
            raise InputError(where, f"of plan {plan[:12]}", f"remove it; this is {self._plan[:12]}")
        return part


def part_name(number: int | None) -> str:
    if number is None:
        return "noise/run.safetensors"
    return f"noise/{number // 1000:04d}/{number:07d}.safetensors"


def packed(part: Part, plan_digest: str) -> bytes:
    """Tensors, and the facts as JSON in the header."""
    facts = json.dumps({"plan": plan_digest, **part.facts}, sort_keys=True)
    tensors = {} if part.tensors is None else {"noise": part.tensors.half().contiguous()}
    return save(tensors, {"facts": facts})


def unpacked(content: bytes) -> tuple[Part, str]:
    """The part, and the digest of the plan it was made for."""
    tensors, metadata = read_tensors(content, where="noise")
    facts = read_object(metadata["facts"].encode(), what="noise facts", most=MOST_HEADER)
    return Part(facts, tensors.get("noise")), facts.pop("plan")
