"""Whole builds of series other than evenly mixed pairs: shards that training can read."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load
from scipy.special import softmax

from data.errors import InputError
from data.images import decode_image
from data.mixed import MixedDataset
from data.root import Root
from data.settings import load_settings
from data.shards import read_tar
from pipeline.build import load_models
from pipeline.config import BuildConfig
from pipeline.prototypes import ensure_prototypes, read_prototypes
from pipeline.root import create_root, plan_of
from pipeline.simplex import simplex_projection
from pipeline.worker import main as worker


@pytest.fixture
def build(hasty_config, tmp_path):
    def run(*overrides: str) -> Root:
        config = load_settings(BuildConfig, hasty_config.model_dump(), overrides)
        root = create_root(config, str(tmp_path / "root"))
        ensure_prototypes(root, device="cpu")
        assert worker([root.url, "--device", "cpu"]) == 0
        root.write_index()
        return root

    return run


def samples(root: Root) -> list[dict]:
    found = []
    for record in root.committed().values():
        with root.store.open(record["tar"]) as file:
            found += [sample.record for sample in read_tar(file)]
    return found


def test_three_classes_are_labelled_on_their_simplex(build):
    root = build(
        "mixing.classes=3",
        "mixing.grid=random",
        "mixing.alphas=5",
        "mixing.pairs={kind: sampled, count: 7}",
        "annotation.rule=simplex",
    )
    vectors, _ = read_prototypes(root)
    features = load(root.store.get(root.committed()[0]["features"]["name"]))["features"].float()
    for position, record in enumerate(samples(root)[:6]):
        expected = simplex_projection(features[position], vectors[record["classes"]])
        labels = torch.tensor([[p for _, p in row] for row in record["labels"]])
        torch.testing.assert_close(labels, expected, atol=0.02, rtol=0)
        assert [[k for k, _ in row] for row in record["labels"]] == [record["classes"]] * 5
        assert record["mixture"][:3] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
        assert record["alphas"] == [row[0] for row in record["mixture"]]
        assert record["weights"] == [row[0] for row in record["coordinates"]]
    mixed = MixedDataset(root.url)
    assert (mixed.classes.shape, mixed.mixtures.shape) == ((7, 3), (7, 5, 3))
    torch.testing.assert_close(mixed.labels.sum(-1), torch.ones(7, 5))
    targets = mixed.classes[:, 2]
    images, labels = mixed.draw(targets, rng=torch.Generator().manual_seed(0))
    assert images.shape == (7, 2, 32, 32, 3)
    assert (
        labels[:, 0].gather(1, targets[:, None]) >= labels[:, 1].gather(1, targets[:, None])
    ).all()
    with pytest.raises(InputError, match=r"mixed\.scale = 4.0: .*mixes 3 classes"):
        MixedDataset(root.url, scale=4.0)


def test_similarity_names_every_class_of_the_data(build):
    root = build(
        "annotation.rule=similarity",
        "annotation.temperature=0.1",
        "mixing.pairs={kind: sampled, count: 3}",
    )
    vectors, _ = read_prototypes(root)
    features = load(root.store.get(root.committed()[0]["features"]["name"]))["features"].float()
    for position, record in enumerate(samples(root)):
        labels = np.array([[p for _, p in row] for row in record["labels"]])
        unit = features[position] / features[position].norm(dim=1, keepdim=True)
        cosine = unit @ (vectors / vectors.norm(dim=1, keepdim=True)).T
        np.testing.assert_allclose(labels, softmax(cosine / 0.1, axis=1), atol=0.01)
        assert [[k for k, _ in row] for row in record["labels"]] == [list(range(10))] * 4
        assert len(record["weights"]) == 4


def test_the_mixing_ratio_is_the_label_and_the_weight_stays_clips(build):
    root = build("annotation.rule=mixing_ratio", "mixing.pairs={kind: sampled, count: 3}")
    for record in samples(root):
        first, second = record["classes"]
        expected = [[[first, alpha], [second, 1 - alpha]] for alpha in record["alphas"]]
        assert record["labels"] == expected
        assert record["weights"] != record["alphas"]


def test_three_classes_want_a_rule_that_knows_three(hasty_config):
    overrides = ["mixing.classes=3", "mixing.grid=random", "mixing.alphas=5"]
    message = (
        "`mixing.classes` above 2 wants `annotation.rule: simplex`, similarity or mixing_ratio"
    )
    with pytest.raises(InputError, match=message):
        load_settings(BuildConfig, hasty_config.model_dump(), overrides)
    for rule in ("simplex", "similarity", "mixing_ratio"):
        found = load_settings(
            BuildConfig, hasty_config.model_dump(), [*overrides, f"annotation.rule={rule}"]
        )
        assert found.annotation.rule == rule


def test_random_alphas_differ_from_series_to_series(build):
    root = build(
        "mixing.grid=random", "mixing.pairs={kind: named, names: [[one, two], [six, two]]}"
    )
    first, second = samples(root)
    assert first["names"] == ["one", "two"]
    assert second["names"] == ["two", "six"]
    assert first["alphas"][1:-1] != second["alphas"][1:-1]
    assert MixedDataset(root.url).alphas.tolist()[0] == pytest.approx(first["alphas"])


def test_similar_pairs_are_drawn_once_and_kept_in_the_root(build):
    root = build("mixing.pairs={kind: similar, count: 5}")
    pairs = json.loads(root.store.get("pairs.json"))
    assert [record["classes"] for record in samples(root)] == pairs
    assert len(set(map(tuple, pairs))) == 5
    root.store.delete("pairs.json")
    ensure_prototypes(root, device="cpu")
    assert json.loads(root.store.get("pairs.json")) == pairs


def test_clip_sees_the_pixels_that_a_lossy_format_keeps(build):
    root = build("shards.image_format=jpg", "mixing.pairs={kind: sampled, count: 3}")
    record = root.committed()[0]
    with root.store.open(record["tar"]) as file:
        images = np.stack([decode_image(i) for s in read_tar(file) for i in s.images])
    stored = load(root.store.get(record["features"]["name"]))["features"].flatten(0, 1).float()
    models = load_models(root, plan_of(root), device="cpu")
    torch.testing.assert_close(
        models.annotator.encode(torch.from_numpy(images))["features"], stored, atol=5e-3, rtol=5e-3
    )


def test_smaller_images_are_stored_and_labelled(build):
    root = build("shards.store_size=16", "mixing.pairs={kind: sampled, count: 3}")
    assert MixedDataset(root.url).images.shape[2:] == (16, 16, 3)


def test_a_spherical_path_makes_other_images_between_the_same_ends(build, hasty_config, tmp_path):
    arc = MixedDataset(
        build("mixing.interpolation=spherical", "mixing.pairs={kind: sampled, count: 3}").url
    )
    line_config = load_settings(
        BuildConfig, hasty_config.model_dump(), ["mixing.pairs={kind: sampled, count: 3}"]
    )
    root = create_root(line_config, str(tmp_path / "line"))
    ensure_prototypes(root, device="cpu")
    assert worker([root.url, "--device", "cpu"]) == 0
    root.write_index()
    line = MixedDataset(root.url)
    assert torch.equal(arc.images[:, [0, -1]], line.images[:, [0, -1]])
    assert not torch.equal(arc.images[:, 1:-1], line.images[:, 1:-1])
