"""Labels baked into a new root: the same images byte for byte, other labels."""

import pytest

from semix.data.errors import InputError
from semix.data.formats import Plan
from semix.data.label_sets import LabelSet
from semix.data.root import Root
from semix.data.verify import verify
from semix.pipeline.bake import bake_shard, open_baked
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.relabel import label_stored, relabelled_config
from semix.pipeline.root import extend_root
from tests.handmade import committed
from tests.pipeline.roots import bake, contents, create_root, plan_of, relabel, samples, tars, work


def label(root: Root, *overrides: str) -> tuple[BuildConfig, LabelSet]:
    config = relabelled_config(root, [f"annotation.{o}" for o in overrides])
    return config, relabel(root, *overrides)


def damage(root: Root) -> list[str]:
    return [str(problem) for problem in verify(root, full=True)]


def test_images_stay_byte_for_byte_and_labels_are_new(root, tmp_path):
    config, labels = label(root, "scale=0.1")
    baked = bake(root, config, labels, tmp_path / "baked")
    before, after = samples(root), samples(baked)
    assert sorted(after) == sorted(before) == list(range(45))
    for group, sample in after.items():
        assert sample.images == before[group].images
        new, old = labels.labels(group // 6)[group], before[group].record
        assert sample.record == old.with_labels(new)
        assert sample.record.labels == new.labels != old.labels


def test_a_baked_root_is_as_any_root(root, tmp_path):
    config, labels = label(root, "rule=mixing_ratio")
    baked = Root(bake(root, config, labels, tmp_path / "baked").url)
    assert damage(baked) == []
    assert baked.missing() == []
    plan = plan_of(baked)
    assert plan.config.annotation.rule == "mixing_ratio"
    assert plan.digest == baked.plan.digest != root.plan.digest
    assert baked.plan.baked_from == {"plan": root.plan.digest, "labels": labels.digest}
    assert create_root(config, baked.url).url == baked.url
    images = samples(baked)[44].images
    baked.discard(7)
    assert work(baked) == 0
    remade = samples(baked)[44]
    assert remade.images == images
    probabilities = [tuple(p for _, p in label) for label in remade.record.labels]
    assert probabilities == list(plan.group(44).mixture)


def test_features_of_another_encoder_come_along(root, other_clip, tmp_path):
    config, labels = label(root, f"model=local-dir:{other_clip}")
    baked = bake(root, config, labels, tmp_path / "baked")
    assert damage(baked) == []
    for shard, entry in committed(baked).items():
        assert entry.features.sha256 == dict(labels.headers())[shard].features.sha256
    assert baked.plan.models["annotation"] == labels.record.encoders
    # Its own features serve the next set, without images.
    _, next_set = label(baked, "scale=2.0")
    assert next_set.record.features == "root"
    assert next_set.missing() == []


def test_own_labels_give_the_same_tars(root, tmp_path):
    config = relabelled_config(root, [])
    baked = bake(root, config, None, tmp_path / "copy")
    assert tars(baked) == tars(root)
    assert damage(baked) == []


def test_what_is_not_committed_is_baked_later_and_nothing_twice(root, tmp_path):
    root.discard(3)
    config, labels = label(root, "scale=4.0")
    baked = bake(root, config, labels, tmp_path / "baked")
    assert baked.missing() == [3]
    before = contents(baked)
    assert work(root) == 0
    label_stored(labels, labels.missing(), plan=build_of(labels.root).plan)
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
    name = committed(root)[2].tar
    tar = bytearray(root.store.get(name))
    tar[700] ^= 1  # inside an image: the tar itself stays whole
    root.store.put(name, bytes(tar))
    target = open_baked(root, config, labels, str(tmp_path / "baked"))
    with pytest.raises(ValueError, match=rf"{name}: does not have the recorded SHA-256"):
        bake_shard(2, source=root, labels=labels, target=target, plan=plan_of(root), prototypes="")
    assert target.store.list("shards") == []


def test_extensions_come_along_for_the_shards_to_come(root, tmp_path):
    extend_root(root, 2)
    longer = Root(root.url)
    config, labels = label(longer, "scale=4.0")
    baked = bake(longer, config, labels, tmp_path / "baked")
    baked = Root(baked.url)
    assert baked.plan.num_groups == longer.plan.num_groups == 90
    assert baked.missing() == longer.missing() == list(range(8, 16))
    assert plan_of(baked).group(80).seed == plan_of(longer).group(80).seed
    assert Plan.read(baked.store.get("plan.json"), where="").num_groups == 45
