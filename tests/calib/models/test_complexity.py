"""What networks cost per image: by hand, as timm publishes, and stems that do not fit."""

from typing import Any

import pytest

from semix.calib.config import TrainConfig
from semix.calib.models.complexity import Complexity, complexity

RESNET50 = {"name": "resnet50"}
TIMM_RESNET50 = {"name": "timm", "architecture": "resnet50"}


def cost_of(model: dict[str, Any], side: int, classes: int = 4) -> Complexity:
    real = {"name": "digits", "image_size": side}
    return complexity(
        TrainConfig.model_validate({"name": "x", "real": real, "model": model}), classes
    )


def test_a_lenet_by_hand():
    cost = cost_of({"name": "lenet"}, 32)
    convolutions = 6 * 28 * 28 * 75 + 16 * 10 * 10 * 150
    assert cost.gmac * 1e9 == convolutions + 400 * 120 + 120 * 84 + 84 * 4
    assert cost.map_side == 5


def test_a_resnet50_of_large_images_costs_what_that_of_timm_does():
    cost, timm_cost = cost_of(RESNET50, 224, 1000), cost_of(TIMM_RESNET50, 224, 1000)
    assert cost.gmac == timm_cost.gmac == pytest.approx(4.1, abs=0.05)  # as in timm's tables
    assert cost.parameters == timm_cost.parameters == 25_557_032
    text = "resnet50 (imagenet stem): 4.09 GMAC per image of 224 pixels, 25.6 million weights"
    assert str(cost) == f"{text}, last map 7 x 7"


def test_small_images_keep_their_stem():
    assert cost_of(RESNET50, 32).gmac == pytest.approx(1.3, abs=0.01)
    assert cost_of(RESNET50, 95).map_side == 12


@pytest.mark.parametrize(
    ("model", "side", "words"),
    [
        (RESNET50, 32, ""),
        (RESNET50, 224, ""),
        ({"name": "resnet8"}, 64, ""),
        ({"name": "timm", "architecture": "vit_tiny_patch16_224"}, 224, ""),  # it has no maps
        ({"name": "resnet50", "stem": "small"}, 224, "larger than 16 x 16"),
        ({"name": "wrn40_2"}, 224, "larger than 16 x 16"),
        ({"name": "densenet121"}, 224, "larger than 16 x 16"),
        ({"name": "resnet20"}, 224, "larger than 16 x 16"),
        (TIMM_RESNET50, 32, "smaller than 2 x 2"),
        ({"name": "resnet50", "stem": "imagenet"}, 32, "smaller than 2 x 2"),
    ],
)
def test_a_stem_that_does_not_fit_is_named_with_what_to_choose(model, side, words):
    remedy = cost_of(model, side).remedy
    assert bool(remedy) == bool(words) and words in remedy
    if words:
        assert "choose resnet18 to resnet152 with `stem: " in remedy
        assert "real.image_size" in remedy
