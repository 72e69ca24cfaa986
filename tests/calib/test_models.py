"""Classifiers: depth, width, outputs and names."""

import pytest
import torch
from torch import nn

from calib.models import build_model
from calib.models.resnet import RESNETS
from data.errors import InputError


@pytest.mark.parametrize("name", RESNETS)
def test_depth_is_what_the_name_says(name: str):
    model = build_model(name, 10, width=1)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(layers) + 1 == int(name.removeprefix("resnet"))  # and the classifier


def test_parameters_by_hand():
    # Width 1, 2 classes. Stem 27 + 2; stage 1: 2 (9 + 2); stage 2: 18 + 36 + 2 + two norms of 4
    # and its norm of 4; stage 3: 72 + 144 + 8 + three norms of 8; classifier 4 x 2 + 2.
    model = build_model("resnet8", 2, width=1)
    expected = 29 + 22 + (56 + 12) + (224 + 24) + 10
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("size", [28, 32, 64])
def test_logits_are_the_classifier_of_the_features(size: int):
    model = build_model("resnet8", 7, width=4).eval()
    images = torch.rand(3, 3, size, size)
    logits, features = model(images)
    assert logits.shape == (3, 7)
    assert features.shape == (3, model.num_features) == (3, 16)
    assert (features >= 0).all()
    torch.testing.assert_close(model.features(images), features)
    torch.testing.assert_close(model.classifier(features), logits)


def test_default_width_and_another_head():
    model = build_model("resnet14", 10)
    assert model.num_features == 64
    model.classifier = nn.Linear(64, 3)
    assert model(torch.rand(2, 3, 32, 32))[0].shape == (2, 3)


def test_the_seed_decides_the_weights():
    def state(seed: int) -> dict:
        torch.manual_seed(seed)
        return dict(build_model("resnet8", 10, width=4).state_dict())

    torch.testing.assert_close(state(0), state(0), rtol=0, atol=0)
    assert not torch.equal(state(0)["classifier.weight"], state(1)["classifier.weight"])


def test_every_parameter_learns():
    model = build_model("resnet14", 4, width=4)
    logits, _ = model(torch.rand(8, 3, 32, 32))
    nn.functional.cross_entropy(logits, torch.arange(8) % 4).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("name", "classes", "params", "text"),
    [
        (
            "resnet50",
            10,
            {},
            r"model\.name = resnet50: choose one of lenet, resnet8, resnet14, .*110$",
        ),
        ("resnet8", 10, {"depth": 3}, r"model\.depth = 3: unknown parameter; choose from width$"),
        ("resnet8", 10, {"blocks": 3}, r"model\.blocks = 3: unknown parameter"),
        ("resnet8", 10, {"width": 0}, r"model\.width = 0: give a whole number of at least 1"),
        ("resnet8", 10, {"width": 1.5}, r"model\.width = 1\.5: give a whole number"),
        ("resnet8", 1, {}, r"num_classes = 1: give a whole number of at least 2"),
    ],
)
def test_bad_settings_are_named(name: str, classes: int, params: dict, text: str):
    with pytest.raises(InputError, match=text):
        build_model(name, classes, **params)


@pytest.mark.parametrize("size", [28, 32, 48])
def test_lenet_by_hand(size: int):
    model = build_model("lenet", 10).eval()
    # 5x5 convolutions 3 -> 6 -> 16, then 400 -> 120 -> 84 -> 10, all with biases.
    expected = 456 + 2416 + 48_120 + 10_164 + 850
    assert sum(p.numel() for p in model.parameters()) == expected
    logits, features = model(torch.rand(2, 3, size, size))
    assert (logits.shape, features.shape) == ((2, 10), (2, 84))
    torch.testing.assert_close(model.classifier(features), logits)
