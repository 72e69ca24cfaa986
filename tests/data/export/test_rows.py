import json

import numpy as np
import pytest
from scipy.special import expit

from data.errors import InputError
from data.export.rows import open_source
from data.images import decode_image
from data.root import Root
from tests.data import hostile
from tests.data.export.conftest import label_shard
from tests.handmade import make_root, pixels, record, sample


def rows_of(root, **options):
    source = open_source(root.url, **options)
    return list(source.rows(source.shards))


def test_every_image_is_a_row_with_its_own_numbers(root):
    rows = rows_of(root)
    assert [(row.group, row.position) for row in rows] == [
        (g, p) for g in range(6) for p in range(3)
    ]
    for row in rows:
        wanted = record(row.group, 3)
        assert (row.classes, row.names) == (wanted["classes"], wanted["names"])
        assert (row.alpha, row.weight) == (
            wanted["alphas"][row.position],
            wanted["weights"][row.position],
        )
        assert row.mixture == [row.alpha, 1 - row.alpha]
        assert row.content == sample(row.group, 3).images[row.position]
        assert dict(row.label) == {k: p for k, p in wanted["labels"][row.position] if p > 0}


def test_images_become_png_without_a_changed_pixel(root):
    for row in rows_of(root, image_format="png"):
        assert (row.extension, row.content[:4]) == ("png", b"\x89PNG")
        wanted = pixels(row.group, 3, 8)[row.position]
        np.testing.assert_array_equal(decode_image(row.content), wanted)


def test_labels_are_sharpened_anew(root):
    for row in rows_of(root, scale=6.0):
        share = expit(6 * (row.weight - 0.5))
        assert [k for k, _ in row.label] == row.classes
        np.testing.assert_allclose([p for _, p in row.label], [share, 1 - share], atol=1e-6)


def test_labels_of_another_set(root, label_set):
    digest = label_set.digest[:8]
    with pytest.raises(
        InputError, match=r"--labels = \w{12}: lacks 1 shards of the index, shard 1"
    ):
        open_source(root.url, labels=digest)
    label_shard(label_set, 1)
    for row in rows_of(root, labels=digest):
        assert row.label == [(row.classes[0], 0.75), (row.classes[1], 0.25)]
        assert row.weight == 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups[1].update(labels=[[[9, 1.0]]] * 3), "a label names another class"),
        (lambda groups: groups.pop(1), "the label set has no labels, or too many, for it"),
        (
            lambda groups: groups[1].update(labels=[[[1, 1.0]]] * 2, weights=[1.0] * 2),
            "the label set has no labels, or too many, for it",
        ),
    ],
)
def test_labels_that_do_not_fit_the_images_are_refused(root, label_set, change, message):
    label_shard(label_set, 1)
    name = label_set.name(0)
    found = json.loads(root.store.get(name))
    change(found["groups"])
    root.store.put(name, json.dumps(found).encode())
    with pytest.raises(ValueError, match=rf"0000000-\w{{8}}\.tar: group 1: {message}"):
        rows_of(root, labels=label_set.digest)


def test_an_index_is_pinned(root):
    first = root.indices()[-1]
    root.discard(1)
    root.write_index()
    assert len(rows_of(root)) == 9
    assert len(rows_of(root, index=first)) == 18
    with pytest.raises(InputError, match=r"--index = index/7\.json: is not in"):
        open_source(root.url, index="index/7.json")


def test_a_root_without_an_index_is_not_exported(tmp_path):
    root = make_root(tmp_path)
    for name in root.indices():
        root.store.delete(name)
    with pytest.raises(InputError, match="is not finished; run `semix resume` first"):
        open_source(root.url)


def test_more_than_two_classes_keep_their_labels(root):
    plan = json.loads(root.store.get("plan.json"))
    plan["config"]["mixing"] = {"classes": 3}
    root.store.put("plan.json", json.dumps(plan).encode())
    assert Root(root.url)
    with pytest.raises(InputError, match=r"--scale = 4\.0: .* mixes 3 classes, whose labels stay"):
        open_source(root.url, scale=4.0)


@pytest.mark.parametrize("kind", ["EPS", "WebP of 60000 pixels", "symlink", "image missing"])
@pytest.mark.parametrize("image_format", ["keep", "png"])
def test_a_hostile_shard_is_named(kind, image_format, tmp_path):
    tar = {**hostile.images(), **hostile.archives(), **hostile.series()}[kind]
    root = make_root(tmp_path, shards=2, groups=1, tars=[tar])
    name = root.committed()[0]["tar"]
    with pytest.raises(ValueError, match=f"^{name}: "):
        source = open_source(root.url, image_format=image_format)
        list(source.rows([{k: v for k, v in source.shards[0].items() if k != "first"}]))
