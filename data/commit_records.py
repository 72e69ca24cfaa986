"""A commit record: where it lies, what it must say to count, what is kept of it."""

import re
from collections.abc import Mapping
from typing import Any

from data.fingerprint import fingerprint
from data.indices import completed
from data.schemas import read_commit_record
from data.shards import shard_name
from data.store import Fact

Record = dict[str, Any]

SHARDS = "shards"
RECORD = re.compile(r"shards/\d{4}/(\d{7})\.json")
# What readers and indices want of a commit record.
KEPT = (
    *("shard", "tar", "sha256", "bytes", "groups", "first", "features", "attempt"),
    *("seconds", "wall_seconds", "tflop", "prototypes", "discards", "record_bytes"),
)


def record_name(shard: int) -> str:
    return f"{shard_name(shard)}.json"


def spec_digest(plan_digest: str, shard: int) -> str:
    """What a commit record must carry to count: this plan and this shard."""
    return fingerprint([plan_digest, shard])


def read_record(content: bytes, name: str, *, plan_digest: str) -> Record:
    """A commit record. Raises ValueError if it is damaged, misplaced, or of another plan."""
    record = read_commit_record(content)
    if record_name(record["shard"]) != name:
        raise ValueError(f"is the record of shard {record['shard']}")
    if record["spec"] != spec_digest(plan_digest, record["shard"]):
        raise ValueError("belongs to another plan")
    return record


def kept(record: Record, size: int) -> Record:
    """What an index keeps of a record of `size` bytes."""
    reduced = completed({key: record[key] for key in KEPT if key in record})
    seconds = {stage: round(value, 3) for stage, value in record["seconds"].items()}
    return {**reduced, "seconds": seconds, "record_bytes": size}


def record_facts(facts: Mapping[str, Fact]) -> dict[int, Fact]:
    """Of the commit records among these files that lie in their place, by shard."""
    found = ((RECORD.fullmatch(name), fact) for name, fact in facts.items())
    return {
        int(match[1]): fact
        for match, fact in found
        if match and record_name(int(match[1])) == match[0]
    }
