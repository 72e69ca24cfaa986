"""Label sets, further labels of a root's images: commit, read, reject, count as missing."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.fingerprint import fingerprint
from semix.data.formats import (
    EncoderAgreement,
    LabelSetRecord,
    SeriesLabels,
    record_name,
)
from semix.data.label_sets import LabelSet, create_set, label_sets
from semix.data.root import Root
from tests.data.whole_roots import failure
from tests.handmade import PLAN_DIGEST, make_root, put_shard, sample, tar_of

GROUPS, SHARDS = 2, 3  # groups in each shard


@pytest.fixture
def root(tmp_path) -> Root:
    """Three committed shards of two series of two images."""
    return make_root(tmp_path, SHARDS, GROUPS)


def labels_of(group: int, weight: float) -> SeriesLabels:
    label = [(0, weight), (1, 1 - weight)]
    return SeriesLabels(group=group, weights=[weight, 1.5], labels=[label] * 2)


def new_set(root: Root, scale: float = 4.0) -> LabelSet:
    annotation, encoders = {"rule": "projection", "scale": scale}, {"model": "a clip"}
    record = LabelSetRecord(
        digest=fingerprint([PLAN_DIGEST, annotation, encoders, 64]),
        plan=PLAN_DIGEST,
        annotation=annotation,
        encoders=encoders,
        features="root",
        batch=64,
    )
    return create_set(root, record)


def commit_labels(labels: LabelSet, shard: int, weight: float = 0.25) -> bool:
    numbers = range(shard * GROUPS, (shard + 1) * GROUPS)
    groups = [labels_of(group, weight) for group in numbers]
    return labels.commit(shard, images=labels.root.record(shard).sha256, groups=groups)


@pytest.mark.parametrize("digits", [1, 5])
def test_too_short_a_name_says_how_many_digits_it_takes(root, digits):
    name = new_set(root).digest
    with pytest.raises(InputError) as caught:
        LabelSet(root, name[:digits])
    assert (caught.value.field, caught.value.value) == ("labels", name[:digits])
    remedy = f"give at least 6 digits of its name; {root.url} has: {name[:12]}"
    assert caught.value.remedy == remedy
    assert LabelSet(root, name[:6]).digest == name


def test_a_scale_is_told_of_the_rule_that_has_one(root):
    assert new_set(root, scale=4.0).status()["scale"] == 4.0
    annotation, encoders = {"rule": "similarity", "scale": "auto"}, {"model": "a clip"}
    record = LabelSetRecord(
        digest=fingerprint([annotation]),
        plan=PLAN_DIGEST,
        annotation=annotation,
        encoders=encoders,
        features="root",
        batch=64,
    )
    assert "scale" not in create_set(root, record).status()


def test_labels_are_read_back_by_group(root):
    labels = new_set(root)
    assert labels.missing() == [0, 1, 2]
    assert commit_labels(labels, 1)
    assert labels.missing() == [0, 2]
    assert labels.header(1).groups == GROUPS
    again = LabelSet(Root(root.url), labels.digest[:6])
    assert again.labels(1) == {2: labels_of(2, 0.25), 3: labels_of(3, 0.25)}
    assert root.store.exists(f"labels/{labels.digest}/0000/0000001.json")


def test_each_listed_folder_calls_the_heartbeat(root):
    labels = new_set(root)
    commit_labels(labels, 1)
    beats = []
    again = LabelSet(Root(root.url, heartbeat=lambda: beats.append(1)), labels.digest)
    assert again.done() == [1]
    assert len(beats) == 1


def test_many_sets_live_on_one_root(root):
    first, second = new_set(root), new_set(root, scale=2.3)
    commit_labels(first, 0, 0.1)
    commit_labels(second, 0, 0.9)
    assert label_sets(root) == sorted([first.digest, second.digest])
    assert first.labels(0)[0].weights == [0.1, 1.5]
    assert second.labels(0)[0].weights == [0.9, 1.5]


def test_the_first_labels_of_some_images_stay(root):
    labels = new_set(root)
    assert commit_labels(labels, 0, 0.1)
    before = root.store.get(labels.name(0))
    assert not commit_labels(labels, 0, 0.9)
    assert root.store.get(labels.name(0)) == before


def test_images_made_again_lose_their_labels_until_they_are_labelled_again(root):
    labels = new_set(root)
    for shard in range(SHARDS):
        commit_labels(labels, shard)
    assert labels.missing() == []
    root.discard(1)
    assert labels.missing() == []  # there are no images to label
    assert labels.done() == [0, 2]
    tar = tar_of(sample(2), sample(3, seed=7))
    put_shard(root.store, 1, tar, first=2, groups=GROUPS, count=2)
    assert labels.missing() == [1]
    with pytest.raises(ValueError, match=r"0000001\.json: these labels are of other images"):
        labels.labels(1)
    assert commit_labels(labels, 1, 0.75)
    assert labels.missing() == []
    assert labels.labels(1)[2].weights == [0.75, 1.5]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: content[:-9], "shard labels: "),
        (lambda content: b"", "shard labels: "),
        (lambda content: content.replace(b'"weights"', b'"wieghts"'), "wieghts|weights"),
        (lambda content: content.replace(b"0.25", b"-9.5"), "greater than or equal"),
        (lambda content: content.replace(b'"shard":0', b'"shard":2'), "of another set or shard"),
        (lambda content: content.replace(b"1.5", b"NaN", 1), "shard labels: "),
    ],
)
def test_damaged_labels_are_named_and_replaced(root, damage, problem):
    labels = new_set(root)
    commit_labels(labels, 0)
    valid = root.store.get(labels.name(0))
    damaged = damage(valid)
    assert damaged != valid
    root.store.put(labels.name(0), damaged)
    reopened = LabelSet(root, labels.digest)
    with pytest.raises(ValueError, match=rf"0000000\.json: .*({problem}).*; remove it and run"):
        reopened.labels(0)
    assert not reopened.is_labelled(0)
    assert commit_labels(reopened, 0)
    assert root.store.get(labels.name(0)) == valid


def test_labels_of_the_second_of_their_shard_are_read_and_count(root):
    """A store whose clock ticks once per second cannot say which of two files is newer."""
    labels = new_set(root)
    commit_labels(labels, 0)
    for name in (record_name(0), labels.name(0)):
        os.utime(Path(root.url, name), (10**9, 10**9))
    assert labels.done() == [0]
    root.store.put(labels.name(0), b"{")
    os.utime(Path(root.url, labels.name(0)), (10**9, 10**9))
    assert labels.done() == []


def test_labels_of_another_set_or_shard_are_refused(root):
    labels, other_set = new_set(root), new_set(root, scale=2.3)
    commit_labels(labels, 0)
    root.store.put(labels.name(1), root.store.get(labels.name(0)))
    root.store.put(other_set.name(0), root.store.get(labels.name(0)))
    for wrong, shard in ((labels, 1), (other_set, 0)):
        with pytest.raises(ValueError, match="of another set or shard"):
            wrong.labels(shard)
    with pytest.raises(ValueError, match="shard 2 has no labels of this set"):
        labels.labels(2)


def test_labels_that_are_no_numbers_are_refused_before_they_are_written(root):
    labels = new_set(root)
    with pytest.raises(ValueError, match="weights"):
        commit_labels(labels, 0, float("nan"))
    with pytest.raises(ValueError, match="labels"):
        commit_labels(labels, 0, 1.5)  # as a probability
    assert not root.store.exists(labels.name(0))


def test_a_digest_is_found_by_its_beginning(root):
    labels = new_set(root)
    assert LabelSet(root, labels.digest[:8]).digest == labels.digest
    for unknown in ("ffffff", labels.digest[1:]):
        with pytest.raises(InputError, match=f"is no label set here; .* {labels.digest[:12]}"):
            LabelSet(root, unknown)


def test_a_root_without_sets_says_how_to_make_one(root):
    assert label_sets(root) == []
    with pytest.raises(InputError, match="has: none; make one with `semix relabel`"):
        LabelSet(root, "0123456")


def test_a_damaged_set_is_named(root):
    labels = new_set(root)
    name = f"labels/{labels.digest}/set.json"
    root.store.put(name, root.store.get(name)[:-20])
    with pytest.raises(ValueError, match=rf"{name}: label set: .*remove it and run"):
        LabelSet(root, labels.digest)


def test_a_set_of_another_root_is_refused(root):
    labels = new_set(root)
    name = f"labels/{labels.digest}/set.json"
    record = json.loads(root.store.get(name)) | {"plan": fingerprint("another")}
    root.store.put(name, json.dumps(record).encode())
    with pytest.raises(ValueError, match=rf"{name}: belongs to another root or set; remove it"):
        LabelSet(root, labels.digest)


def test_failures_are_kept_by_set_and_forgotten_once_labelled(root):
    labels = new_set(root)
    labels.record_failure(failure(1))
    labels.record_failure(failure(1, group=3))
    assert [(f.attempt, f.group) for f in labels.failures()[1]] == [(1, None), (2, 3)]
    assert (labels.progress().failed, labels.failed_attempts(labels.missing())) == (1, {1: 2})
    assert root.failures() == {}
    commit_labels(labels, 1)
    assert labels.failures() == {}
    assert root.store.exists(f"labels/{labels.digest}/failed/0000/0000001.2.json")


def test_progress_counts_the_images_that_are_there(root):
    labels = new_set(root)
    commit_labels(labels, 0)
    root.discard(2)
    progress = labels.progress()
    assert (progress.shards, progress.done, progress.groups, progress.groups_done) == (2, 1, 4, 2)
    assert (progress.images, progress.images_done) == (8, 4)
    assert labels.status()["done"] == 1


def test_writers_at_once_lose_nothing(root):
    labels = new_set(root)
    writers = [LabelSet(Root(root.url), labels.digest) for _ in range(4)]
    commits = [(writer, shard) for shard in range(SHARDS) for writer in writers]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda item: commit_labels(*item), commits))
    assert sum(won) == SHARDS
    assert labels.missing() == []


def test_other_labels_replace_every_part_that_is_a_label():
    agreement = EncoderAgreement(weights=[0.5, 0.5], difference=[0.0, 0.0])
    coordinates = [[0.5, 0.5], [1.0, 0.0]]
    changes = {"agreement": agreement, "coordinates": coordinates}
    before = sample(1).record.model_copy(update=changes)
    new = labels_of(1, 0.25)
    relabelled = before.with_labels(new)
    assert (relabelled.weights, relabelled.labels) == (new.weights, new.labels)
    assert (relabelled.agreement, relabelled.coordinates) == (None, None)
    assert relabelled.with_labels(before) == before
    with pytest.raises(ValueError, match="weights has 1 entries, not 2"):
        before.with_labels(SeriesLabels(group=1, weights=[0.5], labels=new.labels[:1]))
