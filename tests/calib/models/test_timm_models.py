"""Networks of timm: cut in two, filled from a file, refused where they do not fit."""

import logging
import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from semix.calib.models import build_model
from semix.calib.models.base import ImageClassifier
from semix.data.errors import InputError

VIT = "test_vit"


def build(architecture: str, num_classes: int = 7, **params: object) -> ImageClassifier:
    return build_model("timm", num_classes, architecture=architecture, **params).eval()


def save_peer(path: Path, architecture: str, num_classes: int = 7, **options: object) -> nn.Module:
    """A network of timm itself with random weights, also written to a file."""
    torch.manual_seed(5)
    peer = timm.create_model(architecture, num_classes=num_classes, **options).eval()
    state = peer.state_dict()
    for name, value in state.items():
        if value.is_floating_point() and "running_var" not in name:
            value.normal_(std=0.3)
    save_file(state, path)
    return peer


@pytest.mark.parametrize(
    ("architecture", "size"), [(VIT, 160), ("test_resnet", 32), ("test_convnext", 64)]
)
def test_logits_are_those_of_timm(architecture: str, size: int, tmp_path: Path):
    peer = save_peer(tmp_path / "weights.safetensors", architecture)
    model = build(architecture, weights=str(tmp_path / "weights.safetensors"))
    images = torch.rand(2, 3, size, size)
    with torch.no_grad():
        logits, features = model(images)
        expected = peer.forward_head(peer.forward_features(images), pre_logits=True)
        torch.testing.assert_close(logits, peer(images))
        torch.testing.assert_close(features, expected.flatten(1))
    assert features.shape == (2, model.num_features)
    assert type(model.classifier) is nn.Linear


@pytest.mark.parametrize(("architecture", "norm"), [(VIT, "norm"), ("test_vit2", "fc_norm")])
def test_features_before_the_last_norm(architecture: str, norm: str, tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    peer = save_peer(path, architecture)
    post = build(architecture, weights=str(path))
    pre = build(architecture, weights=str(path), feature="pre_norm")
    norm_inputs: list[Tensor] = []
    getattr(peer, norm).register_forward_pre_hook(lambda _, inputs: norm_inputs.append(inputs[0]))
    images = torch.rand(2, 3, 160, 160)
    with torch.no_grad():
        expected = peer(images)
        torch.testing.assert_close(pre(images)[0], expected)
        torch.testing.assert_close(post(images)[0], expected)
        torch.testing.assert_close(pre.classifier(pre.features(images)), expected)
        before = norm_inputs[0][:, 0] if norm == "norm" else norm_inputs[0]
        torch.testing.assert_close(pre.features(images), before)
    assert not torch.allclose(pre.features(images), post.features(images))


def test_a_last_layer_of_other_classes_begins_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "weights.safetensors"
    peer = save_peer(path, "test_resnet", num_classes=1000)
    with caplog.at_level(logging.INFO, logger="semix.train"):
        model = build("test_resnet", 7, weights=str(path))
    assert "last layer fc has other classes and starts with fresh weights" in caplog.text
    assert model.classifier.weight.shape == (7, peer.fc.in_features)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = peer.forward_head(peer.forward_features(images), pre_logits=True)
        torch.testing.assert_close(model(images)[1], expected)


def test_a_file_without_a_last_layer_or_counters_will_do(tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    save_peer(path, "test_resnet")
    state = {n: t for n, t in load_file(path).items() if "num_batches" not in n and "fc." not in n}
    save_file(state, path)
    model = build("test_resnet", weights=str(path))
    torch.testing.assert_close(
        model.features.state_dict()["conv1.0.weight"], state["conv1.0.weight"]
    )


def test_a_vision_transformer_for_another_size_gets_its_positions_resampled(tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    save_peer(path, VIT)
    model = build(VIT, weights=str(path), image_size=32)
    assert model.image_size == 32
    assert model.features.pos_embed.shape[1] == 1 + (32 // 16) ** 2
    assert model(torch.rand(2, 3, 32, 32))[0].shape == (2, 7)
    with torch.device("meta"):  # the header alone fits as well
        build(VIT, weights=str(path), image_size=32)


@pytest.mark.parametrize(("architecture", "size"), [(VIT, 160), ("test_resnet", None)])
def test_what_size_it_takes(architecture: str, size: int | None):
    assert build(architecture).image_size == size


@pytest.mark.parametrize("architecture", [VIT, "test_resnet", "test_convnext"])
def test_every_parameter_is_frozen_once(architecture: str):
    model = build(architecture)
    order = model.freezing_order()
    frozen = [id(parameter) for part in order for parameter in part.parameters()]
    assert sorted(frozen) == sorted(id(parameter) for parameter in model.parameters())
    assert order[0] is model.classifier
    assert len(order) >= 6


def test_a_transformer_is_frozen_block_by_block():
    model = build(VIT)
    order = model.freezing_order()
    assert order[2:-2] == list(reversed(model.features.blocks))
    assert order[-2] is model.features.patch_embed
    token_ids = {id(model.features.cls_token), id(model.features.pos_embed)}
    assert token_ids <= {id(parameter) for parameter in order[-1].parameters()}


def test_nothing_is_loaded_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "weights.safetensors"
    save_peer(path, "test_resnet", num_classes=1000)
    monkeypatch.delattr("semix.calib.models.base.load_file")
    with torch.device("meta"), caplog.at_level(logging.INFO, logger="semix.train"):
        model = build("test_resnet", weights=str(path))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert caplog.text == ""  # said when it happens


def test_the_seed_decides_the_weights_and_planning_draws_nothing():
    torch.manual_seed(3)
    model = build("test_resnet")
    torch.manual_seed(3)
    peer = timm.create_model("test_resnet", num_classes=7)
    torch.testing.assert_close(model.classifier.weight, peer.fc.weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, r"model\.architecture = : see timm\.list_models\(\)$"),
        ({"architecture": "resnet51"}, r"model\.architecture = resnet51: did you mean .*resnet50"),
        ({"architecture": "hf_hub:a/b"}, r"model\.architecture = hf_hub:a/b: see timm"),
        ({"architecture": "dpn48b"}, r"model\.architecture = dpn48b: does not end in one linear"),
        (
            {"architecture": "deit_tiny_distilled_patch16_224"},
            r"model\.architecture = deit_tiny_dist.*: does not end in one linear layer on features",
        ),
        (
            {"architecture": VIT, "feature": "x"},
            r"model\.feature = 'x': choose one of post_norm, pre_",
        ),
        (
            {"architecture": "test_resnet", "feature": "pre_norm"},
            r"model\.feature = pre_norm: test_resnet has no layer norm right before its last layer",
        ),
        (
            {"architecture": "test_vit3", "feature": "pre_norm"},  # tokens are pooled after it
            r"model\.feature = pre_norm: test_vit3 has no layer norm right before its last layer",
        ),
        (
            {"architecture": "test_resnet", "image_size": 32},
            r"model\.image_size = 32: test_resnet accepts any image size; remove this setting",
        ),
        (
            {"architecture": VIT, "image_size": 0},
            r"model\.image_size = 0: input should be greater than or equal to 1",
        ),
        (
            {"architecture": VIT, "image_size": 8},
            r"model\.image_size = 8: test_vit does not take it",
        ),
        ({"architecture": VIT, "weights": "/none"}, r"model\.weights = /none: is not there"),
    ],
)
def test_bad_settings_are_named(params: dict, text: str):
    with torch.device("meta"), pytest.raises(InputError, match=text):
        build_model("timm", 7, **params)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_that_do_not_fit_are_named(device: str, tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    save_peer(path, "test_resnet")
    good = load_file(path)
    first = next(iter(timm.create_model("test_resnet").state_dict()))
    changes = {
        rf"{first} = none: the network has \(\d+, 3, 3, 3\); is it of this": {first: None},
        rf"{first} = \(2,\): the network has": {first: torch.zeros(2)},
        r"more\.weight = \(3,\): the network has none": {"more.weight": torch.zeros(3)},
        r"fc\.weight = \(7, 5\): the network has \(7, \d+\)": {"fc.weight": torch.zeros(7, 5)},
    }
    for text, change in changes.items():
        bad = {name: t for name, t in {**good, **change}.items() if t is not None}
        save_file(bad, path)
        with torch.device(device), pytest.raises(InputError, match=text):
            build("test_resnet", weights=str(path))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_pickle_is_never_read(device: str, tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(pickle.dumps({"a": 1}))
    with torch.device(device), pytest.raises(InputError, match="is no safetensors file"):
        build("test_resnet", weights=str(path))
