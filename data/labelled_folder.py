"""What is remembered of one folder of a label set: which shards count as labelled."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from data.schemas import PER_FOLDER
from data.store import Fact


class LabelledFolder:
    """Shards are labelled if their labels are of the images that are committed now.

    Labels do not change while their images do not. Forty bytes a shard are kept where some have
    labels and some have none, and two a shard otherwise.

    Attributes:
        shards, groups: how many are labelled.
    """

    def __init__(self, number: int) -> None:
        self.number, self._start = number, number * PER_FOLDER
        self.shards = self.groups = 0
        self._places = np.empty(0, np.int16)  # of those that are labelled
        self._complete = False
        self._of = ("", "")  # which images and labels were listed when this held
        self._images: np.ndarray | None = None  # sha256 that the labels name
        self._groups = np.empty(0, np.int32)

    def numbers(self) -> np.ndarray:
        """The shards that are labelled."""
        return self._places.astype(np.int32) + self._start

    def is_complete(self, images: str) -> bool:
        """Whether all these images are labelled; `images` is the digest of their listing."""
        return self._complete and self._of[0] == images

    def is_as_before(self, images: str, listed: Mapping[int, Fact]) -> bool:
        return self._of == (images, _digest(listed))

    def reopen(self, images: str, listed: Mapping[int, Fact]) -> list[int]:
        """The listed shards that are not known to be labelled, now that something changed."""
        if self._images is None:
            self._images = np.zeros((PER_FOLDER, 32), np.uint8)
            self._groups = np.zeros(PER_FOLDER, np.int32)
        labelled = set(self.numbers().tolist()) if self._of[0] == images else set()
        self._places = np.array([s - self._start for s in sorted(labelled & listed.keys())], int)
        return [shard for shard in listed if shard not in labelled]

    def knows(self, shard: int, sha256: str) -> bool:
        """Whether labels of a shard were read that are of these images."""
        assert self._images is not None, "reopen() comes first"
        return self._images[shard - self._start].tobytes() == bytes.fromhex(sha256)

    def learn(self, shard: int, sha256: str, groups: int) -> None:
        assert self._images is not None, "reopen() comes first"
        place = shard - self._start
        self._images[place] = np.frombuffer(bytes.fromhex(sha256), np.uint8)
        self._groups[place] = groups

    def settle(
        self, images: str, listed: Mapping[int, Fact], labelled: Iterable[int], *, of: int
    ) -> None:
        """These are labelled too, `of` so many images that are committed."""
        places = [shard - self._start for shard in labelled]
        self._places = np.union1d(self._places, np.array(places, int)).astype(np.int16)
        self.shards, self.groups = len(self._places), int(self._groups[self._places].sum())
        self._of, self._complete = (images, _digest(listed)), self.shards == of
        if self._complete:
            self._images, self._groups = None, np.empty(0, np.int32)


def _digest(listed: Mapping[int, Fact]) -> str:
    lines = (f"{shard} {fact.bytes} {fact.modified}" for shard, fact in listed.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
