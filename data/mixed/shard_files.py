"""The shards of an index as open files, read at any place by threads and forked processes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from data.mixed.contents import ShardContents, keep_contents, kept_contents, read_contents
from data.shard_cache import ShardCache
from data.store import Store

MOST_OPEN = {True: 128, False: 4}  # by `local`; an open copy keeps its room on the disk


class Descriptor:
    """An open file that closes itself when its last reader lets go of it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class ShardFiles:
    """Reads bytes of the shards of an index: in place where they are local, else from copies.

    Args:
        shards: entries of an index.
        cache: where copies of remote shards are; local roots have no use for it.
    """

    def __init__(
        self, store: Store, shards: Sequence[Mapping[str, Any]], *, cache: ShardCache | None
    ) -> None:
        self.url, self.local, self.shards, self.cache = store.url, store.local, shards, cache
        self._own_by(os.getpid(), store)

    def contents(self, shard: int) -> ShardContents:
        """Records and places of the shard at this position of the index.

        Raises:
            ValueError: the shard is damaged, gone, or not what its index says.
        """
        if self.cache is None:
            return read_contents(self._opened(shard).number, self.shards[shard])
        path = self.cache.folder / "contents" / f"{self.shards[shard]['sha256']}.json"
        contents = kept_contents(path)
        if contents is None:
            contents = read_contents(self._opened(shard).number, self.shards[shard])
            try:
                keep_contents(path, contents)
            except OSError as error:
                raise self.cache.unusable(error) from None
        return contents

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Bytes of the shard at this position of the index."""
        # The local variable keeps the file open while other threads open more.
        descriptor = self._opened(shard)
        return os.pread(descriptor.number, size, offset)

    def fetch_again(self, shard: int) -> bool:
        """Drop a copy whose bytes cannot be right; False if there is no copy to blame."""
        if self.cache is None:
            return False
        self.cache.forget(self.shards[shard])
        with self._lock:
            self._open.pop(shard, None)
        return True

    def _opened(self, shard: int) -> Descriptor:
        if self._process != os.getpid():
            # A fork leaves threads behind, with their locks and their connections.
            self._own_by(os.getpid(), Store(self.url))
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
                return found
        found = Descriptor(self._open_file(self.shards[shard]))
        with self._lock:
            self._open[shard] = found
            while len(self._open) > MOST_OPEN[self.local]:
                self._open.popitem(last=False)
        return found

    def _open_file(self, shard: Mapping[str, Any]) -> int:
        if self.cache is not None:
            return self.cache.open(shard, self._store)
        try:
            with self._store.open(shard["tar"]) as file:
                descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            raise ValueError(f"{shard['tar']} is not in {self.url}; run `semix verify`") from None
        size = os.fstat(descriptor).st_size
        if size != shard["bytes"]:
            os.close(descriptor)
            found = f"{size:,} bytes, its index says {shard['bytes']:,}"
            raise ValueError(f"{shard['tar']}: {found}; run `semix verify`")
        return descriptor

    def _own_by(self, process: int, store: Store) -> None:
        self._process, self._store = process, store
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Descriptor] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        own = ("_process", "_store", "_lock", "_open")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._own_by(os.getpid(), Store(self.url))
