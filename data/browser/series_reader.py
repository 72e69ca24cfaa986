"""Reads single series of shards by byte range: no tar is fetched whole to show a few of its images.

Headers are read up to the series that is asked for, by the strict parser of tars. The hash of a tar
is not checked, since that reads all of it: `semix verify --full` does.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
from PIL import Image

from semix.data.formats import Plan, SeriesRecord, ShardEntry
from semix.data.images import decode_image
from semix.data.store import Store
from semix.data.tar import SeriesSpans, Span, scan_tar

MAX_OPEN = 8  # tars; each remembers the spans of the series up to the last one read
STRIP_SIDE = 96  # pixels of an image in a strip
QUALITY = 85
MEDIA_TYPES = {"webp": "image/webp", "png": "image/png", "jpg": "image/jpeg"}


class SeriesReader:
    """Records and images of the series of a root's shards.

    Every method raises ValueError, which names the tar, for a shard that is damaged, missing, or
    not what its entry says. It can be used by several threads.
    """

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store, self._plan = store, plan
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenTar] = OrderedDict()

    def record(self, entry: ShardEntry, row: int) -> SeriesRecord:
        """The record of the series at this position of a shard."""
        return self._tar(entry).record(row)

    def records(self, entry: ShardEntry) -> Iterator[SeriesRecord]:
        """The records of all series of a shard, from a file of its own."""
        tar = OpenTar(self._store, entry, self._plan)
        for row in range(entry.groups):
            yield tar.record(row)

    def image(self, entry: ShardEntry, row: int, position: int) -> tuple[bytes, str]:
        """The stored bytes of one image, which was decoded once, and their media type."""
        content, extension = self._tar(entry).image(row, position)
        _decoded(content, entry, row, position)
        return content, MEDIA_TYPES[extension]

    def strip(self, entry: ShardEntry, row: int) -> tuple[bytes, str]:
        """All images of a series beside each other by ascending alpha, small, as one picture."""
        tar = self._tar(entry)
        order = np.argsort(tar.record(row).alphas, kind="stable").tolist()
        images = []
        for position in order:
            content, _ = tar.image(row, position)
            images.append(_shrunk(_decoded(content, entry, row, position)))
        if len(shapes := {image.shape for image in images}) > 1:
            which = f"{entry.tar}: group {entry.group_numbers[row]}"
            raise ValueError(f"{which}: images of {len(shapes)} sizes; run `semix verify --full`")
        buffer = io.BytesIO()
        Image.fromarray(np.concatenate(images, axis=1)).save(
            buffer, "WEBP", quality=QUALITY, method=0
        )
        return buffer.getvalue(), MEDIA_TYPES["webp"]

    def _tar(self, entry: ShardEntry) -> "OpenTar":
        with self._lock:
            tar = self._open.get(entry.tar)
            if tar is not None:
                self._open.move_to_end(entry.tar)
                return tar
        tar = OpenTar(self._store, entry, self._plan)
        with self._lock:
            tar = self._open.setdefault(entry.tar, tar)  # another thread may have opened it
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return tar


class OpenTar:
    """A tar whose headers are read as far as needed."""

    def __init__(self, store: Store, entry: ShardEntry, plan: Plan) -> None:
        self._entry, self._plan = entry, plan
        self._groups = entry.group_numbers
        self._lock = threading.Lock()
        try:
            self._file = store.open(entry.tar)
        except FileNotFoundError:
            raise ValueError(f"{entry.tar} is not in {store.url}; run `semix verify`") from None
        size = self._file.seek(0, os.SEEK_END)
        if size != entry.bytes:
            self._fail(f"{size:,} bytes, its record says {entry.bytes:,}")
        self._file.seek(0)
        self._scan = scan_tar(self._file, max_bytes=entry.bytes)
        self._scanned_to = 0
        self._problem = ""  # met while headers were read; the series before it can be shown
        self._spans: list[SeriesSpans] = []

    def record(self, row: int) -> SeriesRecord:
        with self._lock:
            spans = self._series(row)
            content = self._read(spans.record)
        try:
            record = SeriesRecord.read(content)
            self._check(record, spans)
        except ValueError as error:
            self._fail(f"group {spans.group}: {error}")
        return record

    def image(self, row: int, position: int) -> tuple[bytes, str]:
        """The stored bytes of an image, and the extension of its name."""
        with self._lock:
            spans = self._series(row)
            return self._read(spans.images[position]), spans.extension

    def _series(self, row: int) -> SeriesSpans:
        while len(self._spans) <= row:
            if self._problem:
                self._fail(self._problem)
            # Between two headers, contents were read from the same file.
            self._file.seek(self._scanned_to)
            try:
                spans = next(self._scan, None)
            except ValueError as error:
                self._problem = str(error)
                continue
            if spans is None:
                self._problem = f"{len(self._spans)} groups, its record says {self._entry.groups}"
                continue
            self._check_spans(spans)
            self._spans.append(spans)
            self._scanned_to = self._file.tell()
        return self._spans[row]

    def _read(self, span: Span) -> bytes:
        self._file.seek(span.offset)
        content = self._file.read(span.size)
        if len(content) < span.size:
            self._fail(f"it ends inside the member at byte {span.offset}")
        return content

    def _check_spans(self, spans: SeriesSpans) -> None:
        expected = self._groups[len(self._spans)]
        if spans.group != expected:
            self._fail(f"holds group {spans.group} where {expected} belongs")
        if (count := len(spans.images)) != self._plan.images_per_group:
            images = self._plan.images_per_group
            self._fail(f"group {spans.group} has {count} images, the plan has {images}")

    def _check(self, record: SeriesRecord, spans: SeriesSpans) -> None:
        if record.group != spans.group or len(record.alphas) != len(spans.images):
            raise ValueError(f"has the record of group {record.group}")
        if len(record.classes) != self._plan.classes_per_group:
            raise ValueError(f"mixes {len(record.classes)} classes, which the plan does not")
        labelled = (target for label in record.labels for target, _ in label)
        if max(*record.classes, *labelled) >= len(self._plan.class_names):
            raise ValueError("names a class that the plan does not have")

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self._entry.tar}: {problem}; run `semix verify --full`")


def _decoded(content: bytes, entry: ShardEntry, row: int, position: int) -> np.ndarray:
    try:
        return decode_image(content)
    except ValueError as error:
        which = f"group {entry.group_numbers[row]}, image {position}"
        raise ValueError(f"{entry.tar}: {which}: {error}; run `semix verify --full`") from None


def _shrunk(pixels: np.ndarray) -> np.ndarray:
    """Scale to STRIP_SIDE in height, unless the image is smaller."""
    height, width = pixels.shape[:2]
    if height <= STRIP_SIDE:
        return pixels
    size = max(1, round(width * STRIP_SIDE / height)), STRIP_SIDE
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
