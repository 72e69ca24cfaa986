"""What all methods share: settings by name, one way to be called, training that works."""

import pytest
import torch
from accelerate import Accelerator

from semix.calib.check import check_config
from semix.calib.losses import build_loss
from semix.calib.methods import build_method
from semix.calib.network import Network, Normalise
from semix.calib.real_data import open_data
from semix.calib.stage_one import BaseStage
from semix.calib.training_data import pixel_histogram
from semix.data.errors import InputError


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        (
            "cutout",
            {},
            r"method\.name = cutout: choose one of plain, mixup, cutmix, regmixup, rank",
        ),
        ("plain", {"alpha": 1}, r"method\.alpha: unknown setting"),
        ("mixup", {"alpha": 0}, r"method\.alpha = 0: input should be greater than 0"),
        ("mixup", {"heavier": "no"}, r"method\.heavier = 'no': input should be a valid boolean"),
        ("cutmix", {"alpha": -1.0}, r"method\.alpha = -1\.0: input should be greater than 0"),
        (
            "regmixup",
            {"weight": -1},
            r"method\.weight = -1: input should be greater than or equal to 0",
        ),
        ("regmixup", {"variant": "x"}, r"method\.variant = 'x': choose one of code, paper"),
        ("rankmixup", {"kind": "x"}, r"method\.kind = 'x': choose one of mrl, mndcg"),
        ("rankmixup", {"mixes": 1.5}, r"method\.mixes = 1\.5: input should be a valid integer"),
        (
            "rankmixup",
            {"margin": -2},
            r"method\.margin = -2: input should be greater than or equal to 0",
        ),
        ("mit", {"margin": 1}, r"method\.margin = 1: input should be less than 1"),
        ("plp", {"gamma": 0}, r"method\.gamma = 0: input should be greater than 0"),
        (
            "balcal",
            {"delta": 1.1},
            r"method\.delta = 1\.1: input should be less than or equal to 1",
        ),
        (
            "balcal",
            {"start": -0.1},
            r"method\.start = -0\.1: input should be greater than or equal to 0",
        ),
        ("balcal", {"etf_scale": 0}, r"method\.etf_scale = 0: input should be greater than 0"),
    ],
)
def test_bad_settings_are_named(name: str, params: dict, text: str):
    with pytest.raises(InputError, match=text):
        build_method(name, 5, **params)


def test_float_images_pass_as_their_uint8_selves():
    images = torch.randint(256, (6, 4, 4, 3), dtype=torch.uint8)
    normalise = Normalise().fit(pixel_histogram([images]))
    torch.testing.assert_close(normalise(images.float()), normalise(images), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mixup", "cutmix", "regmixup", "rankmixup", "mit"])
def test_a_network_sees_images_in_their_own_range_and_layout(linear, make_batch, name):
    build_method(name, 5)(linear, make_batch(), build_loss("ce", 5))
    for images in linear.inputs:
        assert images.shape[1:] == (4, 4, 3)
        assert images.min() >= 0
        assert 200 < images.max() <= 255


@pytest.mark.parametrize("name", ["mixup", "cutmix", "mit"])
def test_losses_that_cannot_take_blends_are_refused(make_config, name):
    with pytest.raises(InputError, match=rf"loss\.name = ls: method {name} trains with ce$"):
        check_config(make_config("loss.name=ls", f"method.name={name}"))


@pytest.mark.parametrize("name", ["plp", "balcal"])
def test_methods_with_a_classifier_of_their_own_take_no_head(make_config, name):
    config = make_config("loss.name=ce", f"method.name={name}", "model.width=4")
    with pytest.raises(InputError, match=rf"method\.name = {name}: changes the classifier itself"):
        check_config(config)


TRAINED = [
    "method.name=mixup",
    "method.name=cutmix",
    "method.name=regmixup",
    "method.name=rankmixup",
    "method.name=rankmixup method.kind=mndcg",
    "method.name=mit",
    "method.name=plp",
    "method.name=balcal",
]


@pytest.mark.parametrize("method", TRAINED)
def test_training_lowers_the_loss(make_config, method):
    changes = ["loss.name=ce", "head=null", "mixed=null", "model={name: lenet}"]
    config = make_config(*changes, "epochs=12", *method.split())
    check_config(config)
    data = open_data(config)
    # From some first weights BalCAL learns little in twelve epochs; which ones, rounding decides.
    stage = BaseStage(config, data, seed=3, accelerator=Accelerator(cpu=True))
    before = plain_loss(stage, data)
    for epoch in range(12):
        stage.train_epoch(epoch)
    assert plain_loss(stage, data) < 0.9 * before


@pytest.mark.parametrize("method", TRAINED)
def test_mixed_images_pass_beside_every_method(make_config, method):
    config = make_config("loss.name=ce", "head=null", "model.width=3", *method.split())
    check_config(config)
    stage = BaseStage(config, open_data(config), seed=0, accelerator=Accelerator(cpu=True))
    metrics = stage.train_epoch(0)
    assert 0 < metrics["mixed_loss"] < 2
    assert 0 < metrics["loss"] < 10


def plain_loss(stage: BaseStage, data) -> float:
    """Cross-entropy of the training images as they are, in eval mode."""
    network: Network = stage.network.eval()
    with torch.no_grad():
        logits, _ = network(data.images("train").tensor)
    network.train()
    return build_loss("ce", 10)(logits, data.train_targets).item()
