"""What each JSON file of a root may hold; every reader of one asks here.

Readers raise ValueError, as `what: field: problem`.
"""

from data.schemas.fields import (
    MIB,
    MOST_GROUP,
    MOST_INDEX,
    MOST_RECORD,
    PER_FOLDER,
    Count,
    Digest,
    FreeForm,
    Group,
    Sha256,
    Shard,
)
from data.schemas.index import read_index, read_part
from data.schemas.plan import SCHEMA, read_pairs, read_plan, read_verdict
from data.schemas.series import Labels, read_group_record
from data.schemas.shard import read_commit_record, read_failure

__all__ = [
    "MIB",
    "MOST_GROUP",
    "MOST_INDEX",
    "MOST_RECORD",
    "PER_FOLDER",
    "SCHEMA",
    "Count",
    "Digest",
    "FreeForm",
    "Group",
    "Labels",
    "Sha256",
    "Shard",
    "read_commit_record",
    "read_failure",
    "read_group_record",
    "read_index",
    "read_pairs",
    "read_part",
    "read_plan",
    "read_verdict",
]
