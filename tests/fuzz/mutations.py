"""Seeded mutations of valid files: blind ones, and ones that know tars, JSON and images."""

import io
import json
import math
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from typing import Any

BLOCK = 512
NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
NAMES = [
    *("../../etc/passwd", "/etc/passwd", "00000000.json", "00000001.json", "00000000.00.webp"),
    *("00000000.pyd", "00000000.01.png", "00000000.99.jpg", "a.0.5.jpg", "\u0660" * 8 + ".json"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e308, math.nan, math.inf, 10**30, 2**63, "", "x" * 2000),
    *("\x1b[2J", "\u202e", "../x", [], {}, [[]], [None], [0.5, 0.5], {"a": 1}, [[[0, 1.0]]]),
]
FIELDS = {  # of a tar header: (offset, width)
    **{"name": (0, 100), "mode": (100, 8), "size": (124, 12), "time": (136, 12)},
    **{"type": (156, 1), "link": (157, 100), "magic": (257, 8), "prefix": (345, 155)},
}
Mutation = Callable[[bytes, random.Random], bytes]


def mutate(content: bytes, rng: random.Random, *, kind: str) -> bytes:
    """One to three changes; `kind` is a name of `targets`."""
    fitting = {
        "shard": [tar_header, tar_members],
        "image": [image_part, image_part],
        "index": [index_line, index_line],
    }
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice([blindly, *fitting.get(kind, [json_value, json_text])])(content, rng)
    return content


def blindly(content: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, remove, repeat or insert, wherever it falls."""
    changed = bytearray(content)
    start = rng.randrange(len(changed) + 1)
    stop = min(len(changed), start + rng.choice((1, 2, 8, 64, BLOCK, 4000)))
    choice = rng.randrange(7)
    if choice == 0:
        for _ in range(rng.randint(1, 8) if changed else 0):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif choice == 1:
        changed[start:stop] = rng.randbytes(stop - start)
    elif choice == 2:
        del changed[start:]
    elif choice == 3:
        del changed[start:stop]
    elif choice == 4:
        changed[start:start] = changed[start:stop] * rng.choice((1, 2, 50))
    elif choice == 5:
        changed[start:stop] = bytes(stop - start)
    else:
        width = rng.choice((1, 2, 4, 8))
        order = rng.choice(("little", "big"))
        number = rng.choice(NUMBERS) % 2 ** (8 * width)
        changed[start : start + width] = number.to_bytes(width, order)
    return bytes(changed)


def tar_header(content: bytes, rng: random.Random) -> bytes:
    """Change a header field, and correct the checksum."""
    offsets = [p for p in range(0, len(content), BLOCK) if content[p + 257 : p + 262] == b"ustar"]
    if not offsets:
        return content
    offset = rng.choice(offsets)
    header = bytearray(content[offset : offset + BLOCK])
    start, width = FIELDS[rng.choice(list(FIELDS))]
    value = rng.choice(
        [
            rng.randbytes(width),
            b"\x80" + rng.randbytes(width),
            b"%0*o" % (width, rng.choice(NUMBERS)),
            rng.choice(NAMES).encode(),
            rng.choice((b"0", b"1", b"2", b"5", b"7", b"x", b"g", b"L", b"S", b"\0")),
            b"",
        ]
    )
    header[start : start + width] = value[:width].ljust(width, b"\0")
    if len(header) == BLOCK:
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return content[:offset] + bytes(header) + content[offset + BLOCK :]


def tar_members(content: bytes, rng: random.Random) -> bytes:
    """Drop, double, move, rename or mutate members, in a valid tar."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg()]
    except Exception:  # tarfile is no match for what was changed before
        return content
    if not members:
        return content
    index, other_index = rng.randrange(len(members)), rng.randrange(len(members))
    name, inner = members[index]
    choice = rng.randrange(6)
    if choice == 0:
        del members[index]
    elif choice == 1:
        members.insert(other_index, members[index])
    elif choice == 2:
        members[index], members[other_index] = members[other_index], members[index]
    elif choice == 3:
        members[index] = (rng.choice(NAMES), inner)
    else:
        members[index] = (name, mutate(inner, rng, kind="json" if "json" in name else "image"))
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, inner in members:
                info = tarfile.TarInfo(name)
                info.size = len(inner)
                tar.addfile(info, io.BytesIO(inner))
    except ValueError:  # a name, changed before, that no ustar header can hold
        return content
    return buffer.getvalue()


def json_value(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove, double or add a value, at any depth."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    locations = list(_locations(value))
    if not locations:
        return json.dumps(rng.choice(VALUES)).encode()
    parent, key = rng.choice(locations)
    choice = rng.randrange(5)
    if choice < 3:
        parent[key] = rng.choice(VALUES)
    elif choice == 3:
        del parent[key]
    elif isinstance(parent, list):
        parent.insert(key, rng.choice((parent[key], *VALUES)))
    else:
        parent[rng.choice(("extra", key.upper(), "\x1b", "group"))] = rng.choice(VALUES)
    return json.dumps(value).encode()


def _locations(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    return [location for key in keys for location in ((value, key), *_locations(value[key]))]


def json_text(content: bytes, rng: random.Random) -> bytes:
    """Insert text that no JSON writer makes: depth, length, double keys, odd numbers."""
    depth = rng.choice((10, 300, 100_000))
    insertion = rng.choice(
        [
            b"[" * depth,
            b'{"a":' * depth,
            b"[" * depth + b"]" * depth,
            b"9" * depth,
            b"1e999",
            b"-0",
            b"0x10",
            b'"\\ud800"',
            b"\xff\xfe",
            b'"group":1,',
            b"NaN",
            b"//",
            b",",
        ]
    )
    offsets = [i for i, byte in enumerate(content) if byte in b"{[:,"]
    start = rng.choice(offsets) + 1 if offsets else 0
    stop = start + rng.choice((0, 0, 1, 5))
    return content[:start] + insertion + content[stop:]


def index_line(content: bytes, rng: random.Random) -> bytes:
    """Mutate, drop, double or move one line."""
    lines = content.split(b"\n")
    line, other_line = rng.randrange(len(lines)), rng.randrange(len(lines))
    choice = rng.randrange(6)
    if choice == 0:
        del lines[line]
    elif choice == 1:
        lines.insert(other_line, lines[line])
    elif choice == 2:
        lines[line], lines[other_line] = lines[other_line], lines[line]
    else:
        entry, comma = lines[line].removesuffix(b","), lines[line].endswith(b",")
        lines[line] = rng.choice((json_value, json_text))(entry, rng) + b"," * comma
    return b"\n".join(lines)


def image_part(content: bytes, rng: random.Random) -> bytes:
    """Change a file blindly inside, and correct its checksums and sizes."""
    if content[:4] == b"RIFF":
        inner = blindly(content[12:], rng)
        size = struct.pack("<I", min(len(inner) + 4, 2**32 - 1))
        return content[:4] + size + content[8:12] + inner
    if content[:4] == b"\x89PNG":
        return _png(content, rng)
    return content[:3] + blindly(content[3:-2], rng) + content[-2:]


def _png(content: bytes, rng: random.Random) -> bytes:
    chunks, offset = [], 8
    while offset + 12 <= len(content):
        (size,) = struct.unpack(">I", content[offset : offset + 4])
        chunks.append((content[offset + 4 : offset + 8], content[offset + 8 : offset + 8 + size]))
        offset += 12 + size
    if not chunks:
        return content
    index = rng.randrange(len(chunks))
    kind, inner = chunks[index]
    choice = rng.randrange(4)
    if choice == 0:
        chunks[index] = (kind, blindly(inner, rng))
    elif choice == 1 and kind == b"IDAT":
        chunks[index] = (kind, zlib.compress(blindly(bytes(2000), rng)))
    elif choice == 2:
        ancillary = rng.choice(
            (b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"PLTE", b"tRNS", b"pHYs")
        )
        bomb = zlib.compress(bytes(rng.choice((10, 5_000_000))))
        text = rng.choice((b"k\0\0" + bomb, b"k\0\1\0\0\0" + bomb, rng.randbytes(40), b""))
        chunks.insert(index, (rng.choice((ancillary, b"acTL", b"fcTL", b"gAMA", b"cHRM")), text))
    else:
        chunks.insert(rng.randrange(len(chunks) + 1), (kind, inner))
    return content[:8] + b"".join(_chunk(kind, inner) for kind, inner in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc
