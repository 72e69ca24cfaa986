import json
from pathlib import Path

import pytest

from data.errors import InputError
from data.label_sets import LabelSet
from data.root import Root
from data.shards import GroupSample, read_tar
from pipeline.config import BuildConfig
from pipeline.relabel.bake import bake_shard
from pipeline.relabel.baked_root import open_baked
from pipeline.relabel.prototypes import ensure_set_prototypes
from pipeline.relabel.sets import IMAGES, plan_set, relabelled_config
from pipeline.relabel.stored import label_stored
from pipeline.root import create_root, extend_root, plan_of
from pipeline.worker import main as worker


def label(root: Root, *overrides: str) -> tuple[BuildConfig, LabelSet]:
    config = relabelled_config(root, [f"annotation.{o}" for o in overrides])
    labels = plan_set(root, config)
    ensure_set_prototypes(labels, device="cpu")
    if labels.plan["features"] == IMAGES:
        assert worker([root.url, "--labels", labels.digest, "--device", "cpu"]) == 0
    else:
        label_stored(labels, labels.missing())
    return config, labels


def bake(root: Root, config: BuildConfig, labels: LabelSet | None, url: Path) -> Root:
    target, plan = open_baked(root, config, labels, str(url)), plan_of(root)
    for shard in root.committed() if labels is None else labels.committed():
        if not target.is_committed(shard):
            assert bake_shard(shard, source=root, labels=labels, target=target, plan=plan)
    return target


def samples(root: Root) -> dict[int, GroupSample]:
    found = {}
    for record in root.committed().values():
        with root.store.open(record["tar"]) as file:
            found |= {sample.record["group"]: sample for sample in read_tar(file)}
    return found


def contents(root: Root) -> dict[str, bytes]:
    return {name: root.store.get(name) for name in root.store.list("")}


def test_images_stay_byte_for_byte_and_labels_are_new(root, tmp_path):
    config, labels = label(root, "scale=0.1")
    baked = bake(root, config, labels, tmp_path / "baked")
    before, after = samples(root), samples(baked)
    assert sorted(after) == sorted(before) == list(range(45))
    for group, sample in after.items():
        assert sample.images == before[group].images
        new = labels.labels(group // 6)[group]
        assert {key: sample.record[key] for key in new} == new
        assert sample.record["labels"] != before[group].record["labels"]
        kept = before[group].record.keys() - new.keys()
        assert {k: sample.record[k] for k in kept} == {k: before[group].record[k] for k in kept}


def test_a_baked_root_is_as_any_root(root, tmp_path):
    config, labels = label(root, "rule=mixing_ratio")
    baked = Root(bake(root, config, labels, tmp_path / "baked").url)
    assert baked.verify(full=True) == []
    assert baked.missing() == []
    plan = plan_of(baked)
    assert plan.config.annotation.rule == "mixing_ratio"
    assert plan.digest == baked.plan["digest"] != root.plan["digest"]
    assert baked.plan["baked_from"] == {"plan": root.plan["digest"], "labels": labels.digest}
    assert create_root(config, baked.url).url == baked.url
    images = samples(baked)[44].images
    baked.discard(7)
    assert worker([baked.url, "--device", "cpu"]) == 0
    made = samples(baked)[44]
    assert made.images == images
    assert [[p for _, p in label] for label in made.record["labels"]] == [
        list(row) for row in plan.group(44).mixture
    ]


def test_features_of_another_encoder_come_along(root, other_clip, tmp_path):
    config, labels = label(root, f"model=local-dir:{other_clip}")
    baked = bake(root, config, labels, tmp_path / "baked")
    assert baked.verify(full=True) == []
    for shard, record in baked.committed().items():
        head = labels.committed()[shard]["features"]
        assert record["features"]["sha256"] == head["sha256"]
    assert baked.plan["models"]["annotation"] == labels.plan["encoders"]
    # Its own features serve the next set, without images.
    _, next_set = label(baked, "scale=2.0")
    assert next_set.plan["features"] == "root"
    assert next_set.missing() == []


def test_own_labels_give_the_same_tars(root, tmp_path):
    config = relabelled_config(root, [])
    baked = bake(root, config, None, tmp_path / "copy")
    tars = {r["tar"]: r["sha256"] for r in root.committed().values()}
    assert {r["tar"]: r["sha256"] for r in baked.committed().values()} == tars
    assert baked.verify(full=True) == []


def test_what_is_not_committed_is_baked_later_and_nothing_twice(root, tmp_path):
    root.discard(3)
    config, labels = label(root, "scale=4.0")
    baked = bake(root, config, labels, tmp_path / "baked")
    assert baked.missing() == [3]
    before = contents(baked)
    assert worker([root.url, "--device", "cpu"]) == 0
    label_stored(labels, labels.missing())
    bake(root, config, labels, tmp_path / "baked")
    after = contents(baked)
    assert baked.missing() == []
    assert {name: after[name] for name in before} == before
    bake(root, config, labels, tmp_path / "baked")
    assert contents(baked) == after


def test_a_place_that_holds_something_else_is_refused(root, tmp_path):
    config, labels = label(root, "scale=4.0")
    bake(root, config, labels, tmp_path / "baked")
    other_config, other = label(root, "scale=2.0")
    before = contents(Root(str(tmp_path / "baked")))
    with pytest.raises(InputError, match=r"out = .*baked: holds another dataset"):
        open_baked(root, other_config, other, str(tmp_path / "baked"))
    with pytest.raises(InputError, match="is the root itself"):
        open_baked(root, config, labels, root.url)
    assert contents(Root(str(tmp_path / "baked"))) == before


def test_damaged_images_are_named_and_never_published(root, tmp_path):
    config, labels = label(root, "scale=4.0")
    record = root.committed()[2]
    tar = bytearray(root.store.get(record["tar"]))
    tar[700] ^= 1  # inside an image: the tar itself stays whole
    root.store.put(record["tar"], bytes(tar))
    target = open_baked(root, config, labels, str(tmp_path / "baked"))
    with pytest.raises(ValueError, match=rf"{record['tar']}: does not have the recorded SHA-256"):
        bake_shard(2, source=root, labels=labels, target=target, plan=plan_of(root))
    assert target.store.list("shards") == []


def test_extensions_come_along_for_the_shards_to_come(root, tmp_path):
    extend_root(root, 2)
    longer = Root(root.url)
    config, labels = label(longer, "scale=4.0")
    baked = bake(longer, config, labels, tmp_path / "baked")
    baked = Root(baked.url)
    assert baked.plan["num_groups"] == longer.plan["num_groups"] == 90
    assert baked.missing() == longer.missing() == list(range(8, 16))
    assert plan_of(baked).group(80).seed == plan_of(longer).group(80).seed
    written = json.loads(baked.store.get("plan.json"))
    assert written["num_groups"] == 45
