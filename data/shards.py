"""A shard: groups of images and labels in one plain tar, byte for byte a function of them."""

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from data.fingerprint import canonical_json
from data.images import ENCODINGS

MEMBER = re.compile(r"(?P<key>\d{8})\.(?:(?P<position>\d{2})\.(?P<image>webp|png|jpg)|json)")


@dataclass(frozen=True)
class GroupSample:
    """One series of images from one initial noise, as a webdataset sample.

    Attributes:
        record: group, classes, names, seed, alphas, weights, labels, noise (see README).
        images: encoded images, one an alpha, in the order of `record["alphas"]`.
        extension: webp, png or jpg.
    """

    record: dict[str, Any]
    images: list[bytes]
    extension: str


def group_key(group: int) -> str:
    return f"{group:08d}"


def shard_name(index: int) -> str:
    """Where shard `index` lives, without extension; at most a thousand shards a folder."""
    return f"shards/{index // 1000:04d}/{index:07d}"


def write_tar(file: BinaryIO, samples: Iterable[GroupSample]) -> None:
    """Write samples as `KEY.00.webp .. KEY.json`; fixed times, owners and order."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            key = group_key(sample.record["group"])
            for position, content in enumerate(sample.images):
                _add(tar, f"{key}.{position:02d}.{sample.extension}", content)
            _add(tar, f"{key}.json", canonical_json(sample.record).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its defaults are time 0, owner 0, mode 0644
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read_tar(file: BinaryIO) -> Iterator[GroupSample]:
    """Samples of a plain tar, decoded by an allow-list.

    Raises:
        ValueError: a damaged or compressed tar, or a member that no semix shard has.
    """
    pending: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                if not member.isreg() or not MEMBER.fullmatch(member.name):
                    raise ValueError(f"{member.name!r} does not belong in a shard")
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                pending[member.name] = content
                if member.name.endswith(".json"):
                    yield _sample(pending, member.name)
                    pending = {}
    except tarfile.TarError as error:
        raise ValueError(f"damaged tar: {error}") from None
    if pending:
        raise ValueError(f"damaged tar: it ends inside group {min(pending)[:8]}")


def _sample(members: dict[str, bytes], json_name: str) -> GroupSample:
    key = json_name.removesuffix(".json")
    record = json.loads(members[json_name])
    images = [name for name in members if name != json_name]
    extension = images[0].rpartition(".")[2] if images else "webp"
    count = len(record["alphas"])
    expected = [f"{key}.{position:02d}.{extension}" for position in range(count)]
    if extension not in ENCODINGS or images != expected or group_key(record["group"]) != key:
        raise ValueError(f"group {key} has members {', '.join(members)}; wanted {count} images")
    return GroupSample(record, [members[name] for name in images], extension)
