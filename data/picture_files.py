"""Picture files as the labelled images of a split, decoded on access."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semix.data.errors import InputError
from semix.data.fingerprint import file_digest, fingerprint
from semix.data.images import load_square
from semix.data.machine import cores
from semix.data.splits import ImageSplit
from semix.data.threads import mapped

EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif"}
MAX_THREADS = 16


@dataclass(frozen=True)
class PictureFiles:
    """Picture files, loaded as squares of `size` pixels.

    Attributes:
        may_skip: whether `real.skip_bad` can leave out those that cannot be decoded.
    """

    paths: list[Path]
    size: int
    may_skip: bool = False

    def split(self, targets: np.ndarray) -> ImageSplit:
        """The split with these classes, int64 [N]."""
        return ImageSplit(targets, load=self.load, content=self.content, name=self.name)

    def load(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._load(self.paths[index]) for index in indices])

    def _load(self, path: Path) -> np.ndarray:
        try:
            return load_square(path, self.size)
        except OSError as error:
            remedy = f"cannot be read ({error}); replace or remove it"
            if error.errno is None and self.may_skip:
                remedy += ", or leave out such images with real.skip_bad"
            raise InputError("image", path, remedy) from None

    def content(self, heartbeat: Callable[[], None]) -> str:
        digests = []
        for digest in mapped(file_digest, self.paths, threads=min(MAX_THREADS, cores())):
            digests.append(digest)
            heartbeat()
        return fingerprint([self.size, *digests])

    def name(self, index: int) -> str:
        return str(self.paths[index])
