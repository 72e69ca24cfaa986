"""A small finished root, and a second label set of it."""

from pathlib import Path

import pytest

from data.label_records import SET_SCHEMA, set_digest
from data.label_sets import LabelSet, create_set
from data.root import Root
from tests.handmade import PLAN_DIGEST, make_root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two shards of three series of three images."""
    return make_root(tmp_path / "root", shards=2, groups=3, count=3)


@pytest.fixture
def label_set(root: Root) -> LabelSet:
    """Every image is three quarters the first of its classes; of the first shard only."""
    annotation, encoders = {"rule": "projection"}, {"model": "a clip"}
    record = {
        "schema": SET_SCHEMA,
        "digest": set_digest(PLAN_DIGEST, annotation, encoders, 64),
        "plan": PLAN_DIGEST,
        "annotation": annotation,
        "encoders": encoders,
        "features": "root",
        "batch": 64,
    }
    found = create_set(root, record)
    label_shard(found, 0)
    return found


def label_shard(label_set: LabelSet, shard: int) -> None:
    images = label_set.images()[shard]
    groups = []
    for group in range(images["first"], images["first"] + images["groups"]):
        first, second = [(0, 1), (0, 2), (1, 2)][group % 3]
        label = [[first, 0.75], [second, 0.25]]
        groups.append({"group": group, "weights": [0.6] * 3, "labels": [label] * 3})
    assert label_set.commit(shard, images=images["sha256"], groups=groups)
