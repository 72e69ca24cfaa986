"""Shards, images and records as an attacker would write them; CANARY appears if one succeeds."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import save

from tests.handmade import sample, tar_of

WHOLE = tar_of(sample(3), sample(4))
IMAGE = sample(3).images[0]
TYPES = (*(b"%c" % kind for kind in b"1234567xgLKSVDMNX"), b"\0")  # all but that of plain files
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch CANARY) (r) file\n"


class Payload:
    """An object whose unpickling runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.canary}'",)


def tar_with(name: str, content: bytes = b"", **header: object) -> bytes:
    """A series, then one more member with these header fields."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        with tarfile.open(fileobj=io.BytesIO(tar_of(sample(3)))) as tar_of_series:
            for member in tar_of_series:
                tar.addfile(member, tar_of_series.extractfile(member))
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for field, value in header.items():
            setattr(info, field, value)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def edit_header(content: bytes, offset: int, field: bytes) -> bytes:
    """Replace bytes of the first header at `offset`, and correct its checksum."""
    header = bytearray(content[:512])
    header[offset : offset + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


def pax(**fields: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("00000005.00.webp")
        info.pax_headers = fields
        tar.addfile(info)
    return buffer.getvalue()


def pickles(canary: Path) -> dict[str, bytes]:
    """Tars with a payload under every name that webdataset would unpickle."""
    content = pickle.dumps(Payload(canary))
    names = ["pyd", "pickle", "pkl", "pth", "PYD", "pyd.gz", "00.pyd", "npy", "npz", "json.pyd"]
    tars = {f"pickle.{name}": tar_with(f"00000004.{name}", content) for name in names}
    tars["pickle for json"] = tar_with("00000004.json", content)
    tars["pickle for webp"] = shard_of_images(content)
    return tars


def shard_of_images(content: bytes) -> bytes:
    """A valid shard whose images are `content`."""
    valid = sample(3)
    return tar_of(type(valid)(valid.record, [content] * 2, valid.extension))


def archives() -> dict[str, bytes]:
    """Tars whose links, compression or sizes other readers would follow."""
    zeros = bytes(50 << 20)
    bomb = tar_with("00000004.00.webp", zeros)
    tars = {
        "gzip bomb": gzip.compress(bomb),
        "bzip2 bomb": bz2.compress(bomb),
        "xz bomb": lzma.compress(bomb, preset=0),
        "symlink": tar_with("00000004.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "hard link": tar_with("00000004.json", type=tarfile.LNKTYPE, linkname="../../etc/passwd"),
        "link name on a file": tar_with("00000004.json", linkname="/etc/passwd"),
        "device": tar_with("00000004.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        "pipe": tar_with("00000004.json", type=tarfile.FIFOTYPE),
        "folder": tar_with("00000004.json", type=tarfile.DIRTYPE),
        "old file type": tar_with("00000004.json", type=tarfile.AREGTYPE),
        "GNU sparse": tar_with("00000004.00.webp", type=tarfile.GNUTYPE_SPARSE),
        "GNU long name": tar_with("00000004.json", b"x" * 600, type=tarfile.GNUTYPE_LONGNAME),
        "pax size": pax(size="8" + "0" * 18),
        "pax sparse": pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        "pax path": pax(path="../../etc/cron.d/x"),
        **{f"type {kind!r}": edit_header(WHOLE, 156, kind) for kind in TYPES},
        "only a link name": edit_header(WHOLE, 157, b"/etc/passwd"),
        "size in binary": edit_header(WHOLE, 124, b"\x80" + len(IMAGE).to_bytes(11, "big")),
        "eight exabytes": edit_header(WHOLE, 124, b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7),
        "negative size": edit_header(WHOLE, 124, b"\xff" * 12),
        "eight gibibytes": edit_header(WHOLE, 124, b"77777777777\0"),
        "size of spaces": edit_header(WHOLE, 124, b" " * 12),
        "no magic": edit_header(WHOLE, 257, bytes(8)),
        "prefix": edit_header(WHOLE, 345, b"../../etc"),
        "bad checksum": WHOLE[:100] + b"7" + WHOLE[101:],
        "not a tar": b"PK\x03\x04" + bytes(9996),
        "nothing": b"",
    }
    names = ["../../x", "/etc/x", "..", ".", "a/../../b", "00000004.json/", "\x1b[2J.json"]
    names += ["img_0.25.jpg", "pipe:touch CANARY", "${WDS_x}.json", "__x__.json", "~.json"]
    return tars | {f"member {name!r}": tar_with(name, b"{}") for name in names}


def series() -> dict[str, bytes]:
    """Tars of allowed members that do not make complete series."""
    with tarfile.open(fileobj=io.BytesIO(WHOLE)) as tar:
        a0, a1, a, b0, b1, b = [(m.name, tar.extractfile(m).read()) for m in tar]
    orders = {
        "member twice": [a0, a0, a1, a],
        "series twice": [a0, a1, a, a0, a1, a],
        "interleaved series": [a0, b0, a1, b1, a, b],
        "image missing": [a0, a],
        "record missing": [a0, a1, b0, b1, b],
        "nested json": [a0, a1, (a[0], b"[" * 500_000)],
        "nested noise": [a0, a1, (a[0], a[1].replace(b"null", b"[" * 10_000 + b"]" * 10_000))],
        "a billionth digit": [a0, a1, (a[0], b'{"seed":' + b"9" * 3_000_000 + b"}")],
        "huge text": [a0, a1, (a[0], b'{"x":"' + b"x" * 5_000_000 + b'"}')],
    }
    return {name: tar_of_members(members) for name, members in orders.items()}


def tar_of_members(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def images() -> dict[str, bytes]:
    """Valid shards whose images are no images, or would be enormous."""
    size = (59_999).to_bytes(3, "little")
    vp8x = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + size
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    png += _chunk(b"IDAT", zlib.compress(bytes(100_000))) + _chunk(b"IEND", b"")
    contents = {
        "EPS": EPS,
        "WebP of 60000 pixels": b"RIFF" + struct.pack("<I", len(vp8x)) + vp8x,
        "PNG of 60000 pixels": png,
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://127.0.0.1/x'/></svg>",
        "no bytes": b"",
    }
    return {name: shard_of_images(content) for name, content in contents.items()}


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def tensor_files(canary: Path) -> dict[str, bytes]:
    """Contents in place of a safetensors file."""
    import numpy as np

    valid = save({"features": np.zeros((2, 2, 4), dtype=np.float16)})
    entry = b'{"features":{"dtype":"F16","shape":%s,"data_offsets":[0,32]}}'

    def with_header(header: bytes) -> bytes:
        return struct.pack("<Q", len(header)) + header + bytes(32)

    return {
        "pickle": pickle.dumps(Payload(canary)),
        "empty": b"",
        "header of 8 EiB": struct.pack("<Q", 2**63) + valid[8:],
        "header of 1 GB": struct.pack("<Q", 10**9) + valid[8:],
        "cut": valid[:-1],
        "more": valid + b"\0",
        "nested header": with_header(b'{"a":' * 50_000),
        "shape beyond its bytes": with_header(entry % b"[1099511627776,1099511627776]"),
        "a million dimensions": with_header(entry % b"[16%s]" % (b",1" * 1_000_000)),
        "negative shape": with_header(entry % b"[-16]"),
        "shape that overflows": with_header(entry % b"[0,9223372036854775807,9223372036854775807]"),
        "unknown type": with_header(entry.replace(b"F16", b"PY1") % b"[16]"),
        "same tensor twice": with_header(
            b"{%s,%s}" % ((entry % b"[16]")[1:-1], (entry % b"[16]")[1:-1])
        ),
        "metadata of numbers": with_header(b'{"__metadata__":{"a":1}}'),
    }
