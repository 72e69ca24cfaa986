"""Two CLIP models on the same images, and how far their labels are apart."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from scipy.special import expit

from data.errors import InputError
from data.root import PROTOTYPES, Root
from data.settings import load_settings
from data.shards import read_tar
from pipeline.annotate import Annotator, Encoders, build_annotator
from pipeline.annotation.space import Space
from pipeline.config import AnnotationConfig, BuildConfig, EncoderConfig
from pipeline.costs.flops import model_costs
from pipeline.prototypes import ensure_prototypes, unpack
from pipeline.root import create_root
from pipeline.worker import main as worker

SECOND = {"model": "ViT-B-32-quickgelu", "pretrained": "laion400m_e32"}


@pytest.fixture(scope="module")
def second_clip(hasty_standins, tmp_path_factory) -> Path:
    """The hasty CLIP with other weights: a genuine second model."""
    folder = tmp_path_factory.mktemp("second") / "clip"
    shutil.copytree(hasty_standins.clip, folder)
    weights = load_file(folder / "open_clip_model.safetensors")
    rng = torch.Generator().manual_seed(0)
    moved = {
        name: w + 0.3 * w.std() * torch.randn(w.shape, generator=rng) if w.ndim > 1 else w
        for name, w in weights.items()
    }
    save_file(moved, folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def agreed(hasty_config, second_clip, tmp_path_factory) -> Root:
    config = load_settings(
        BuildConfig,
        hasty_config.model_dump(),
        [
            f"annotation.second={{model: 'local-dir:{second_clip}'}}",
            "mixing.pairs={kind: sampled, count: 5}",
        ],
    )
    root = create_root(config, str(tmp_path_factory.mktemp("agreed")))
    ensure_prototypes(root, device="cpu")
    assert worker([root.url, "--device", "cpu"]) == 0
    return root


def features_by_hand() -> Annotator:
    """Two encoders whose first classes lie on different axes, each with its own scale."""
    one = Space(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), 4.0)
    two = Space(torch.tensor([[0.0, 2.0], [0.0, 0.0], [2.0, 0.0]]), 2.0)
    config = AnnotationConfig(second=EncoderConfig(model="another"))
    return Annotator(config, {"features": one, "second": two}, Encoders(config, device="cpu"))


def test_the_difference_is_that_of_the_sharpened_probabilities():
    features = {
        "features": torch.tensor([[1.0, 0.0], [0.5, 9.0]]),
        "second": torch.tensor([[0.0, 2.0], [0.0, 0.0]]),
    }
    found = features_by_hand().annotate(features, classes=(0, 1), mixture=((1, 0), (0.5, 0.5)))
    assert found["weights"] == [1.0, 0.5]
    assert found["agreement"]["weights"] == [1.0, 0.0]
    expected = [expit(4 * 0.5) - expit(2 * 0.5), expit(0) - expit(2 * -0.5)]
    np.testing.assert_allclose(found["agreement"]["difference"], expected, atol=1e-6)


def test_three_classes_differ_by_total_variation():
    annotator = features_by_hand()
    config = annotator.config.model_copy(update={"rule": "simplex"})
    spaces = {
        name: Space(space.prototypes, 1.0, "simplex") for name, space in annotator.spaces.items()
    }
    found = Annotator(config, spaces, annotator.encoders).annotate(
        {"features": torch.tensor([[1.0, 0.0]]), "second": torch.tensor([[1.0, 0.5]])},
        classes=(0, 1, 2),
        mixture=((1, 0, 0),),
    )
    assert found["labels"] == [[[0, 1.0], [1, 0.0], [2, 0.0]]]
    # (1, 1/2) is half of (2, 0) and a quarter of (0, 2): labels (1, 0, 0) and (.25, .25, .5).
    np.testing.assert_allclose(found["agreement"]["difference"], [0.75], atol=1e-6)
    np.testing.assert_allclose(found["agreement"]["weights"], [0.25], atol=1e-6)


def test_the_mixing_ratio_compares_what_the_two_models_see():
    annotator = features_by_hand()
    config = annotator.config.model_copy(update={"rule": "mixing_ratio"})
    features = {"features": torch.tensor([[1.0, 0.0]]), "second": torch.tensor([[0.0, 0.0]])}
    found = Annotator(config, annotator.spaces, annotator.encoders).annotate(
        features, classes=(0, 1), mixture=((0.3, 0.7),)
    )
    assert found["labels"] == [[[0, 0.3], [1, 0.7]]]
    np.testing.assert_allclose(found["agreement"]["difference"], [expit(2) - expit(-1)], atol=1e-6)


def test_a_build_stores_what_both_models_say(agreed, hasty_config):
    content = agreed.store.get(PROTOTYPES)
    tensors, facts = unpack(content)
    assert tensors["second"].shape == tensors["prototypes"].shape
    assert not torch.equal(tensors["second"], tensors["prototypes"])
    assert float(facts["second_scale"]) != float(facts["scale"])
    record = agreed.committed()[0]
    stored = load(agreed.store.get(record["features"]["name"]))
    assert {name: (rows.dtype, rows.ndim) for name, rows in stored.items()} == {
        "features": (torch.float16, 3),
        "second": (torch.float16, 3),
    }
    with agreed.store.open(record["tar"]) as file:
        samples = [sample.record for sample in read_tar(file)]
    for row, sample in enumerate(samples):
        first, second = (tensors["second"][k].double().numpy() for k in sample["classes"])
        features = stored["second"][row].double().numpy()
        weights = (features - second) @ (first - second) / np.sum((first - second) ** 2)
        agreement = sample["agreement"]
        np.testing.assert_allclose(agreement["weights"], weights, atol=0.02, rtol=0.02)
        own, other = np.array(sample["weights"]), np.array(agreement["weights"])
        ours = expit(float(facts["scale"]) * (own - 0.5))
        theirs = expit(float(facts["second_scale"]) * (other - 0.5))
        np.testing.assert_allclose(agreement["difference"], abs(ours - theirs), atol=1e-5)


def test_annotating_stored_features_loads_no_clip(agreed, second_clip, monkeypatch):
    config = load_settings(AnnotationConfig, agreed.plan["config"]["annotation"])
    annotator = build_annotator(config, agreed.store.get(PROTOTYPES), device="cpu")
    record = agreed.committed()[0]
    stored = load(agreed.store.get(record["features"]["name"]))
    with agreed.store.open(record["tar"]) as file:
        sample = next(read_tar(file)).record
    monkeypatch.setattr(Encoders, "load", None)
    found = annotator.annotate(
        {name: rows[0] for name, rows in stored.items()},
        classes=sample["classes"],
        mixture=[[alpha, 1 - alpha] for alpha in sample["alphas"]],
    )
    assert "_loaded" not in vars(annotator.encoders)
    np.testing.assert_allclose(found["weights"], sample["weights"], atol=0.02, rtol=0.02)


def test_the_plan_names_both_models_and_a_change_of_the_second_is_refused(
    agreed, second_clip, hasty_config, tmp_path
):
    identity = agreed.plan["models"]["annotation"]
    assert set(identity["second"]["files"]) == set(identity["files"])
    weights = "open_clip_model.safetensors"
    assert identity["second"]["files"][weights] != identity["files"][weights]
    shutil.copytree(second_clip, tmp_path / "clip")
    override = f"annotation.second={{model: 'local-dir:{tmp_path / 'clip'}'}}"
    config = load_settings(BuildConfig, hasty_config.model_dump(), [override])
    create_root(config, str(tmp_path / "root"))
    settings = tmp_path / "clip" / "open_clip_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text())))
    with pytest.raises(InputError, match=r"annotation\.model = .*its files changed since"):
        create_root(config, str(tmp_path / "root"))


def test_both_models_count_in_the_cost(hasty_config, second_clip):
    two = load_settings(
        BuildConfig,
        hasty_config.model_dump(),
        [f"annotation.second={{model: 'local-dir:{second_clip}'}}"],
    )
    alone, both = model_costs(hasty_config), model_costs(two)
    assert both.clip == 2 * alone.clip
    assert both.feature_width == 2 * alone.feature_width


def test_prototypes_without_the_second_model_are_refused(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "root"))
    ensure_prototypes(root, device="cpu")
    config = hasty_config.annotation.model_copy(update={"second": EncoderConfig(**SECOND)})
    with pytest.raises(ValueError, match="the prototypes hold none of second; measure them"):
        build_annotator(config, root.store.get(PROTOTYPES), device="cpu")


def test_a_bad_second_model_is_named_before_anything_is_made(hasty_config, tmp_path):
    overrides = ["annotation.second={model: ViT-B-33, pretrained: openai}"]
    config = load_settings(BuildConfig, hasty_config.model_dump(), overrides)
    with pytest.raises(InputError, match=r"annotation\.second\.model = ViT-B-33: open_clip has no"):
        create_root(config, str(tmp_path / "root"))
