"""Convolutional classifiers: depth, width, parameters, outputs and names."""

from functools import partial

import pytest
import torch
import torchvision
from timm.layers import BatchNormAct2d
from timm.models.resnetv2 import DownsampleConv, PreActBasic
from torch import nn

from semix.calib.config.model import MODELS
from semix.calib.models import build_model, convnets
from semix.calib.models.convnets import (
    FOUR_STAGES,
    THREE_STAGES,
    DenseNet,
    Pointwise,
    PreActivationBlock,
    ResNet,
    WideResNet,
)
from semix.data.errors import InputError

# Of the official code, all layers and 10 classes; WRN-28-10 and WRN-40-2 as published.
PARAMETERS = {
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "resnet152": 58_156_618,
    "resnet110_bottleneck": 45_864_522,
    "resnet50_tiny": 23_582_282,
    "resnet101_tiny": 42_574_410,
    "wrn26_10": 36_481_434,
    "wrn28_10": 36_479_194,
    "wrn40_2": 2_243_546,
    "densenet121": 6_956_298,
    "resnet20": 272_474,
    "resnet110": 1_730_714,
}
# All but timm, in widths that are cheap to run.
SMALL = {
    "lenet": partial(build_model, "lenet"),
    "resnet8": partial(build_model, "resnet8", width=4),
    **{name: partial(build_model, name, width=2) for name in FOUR_STAGES},
    **{f"{name}_tiny": partial(build_model, f"{name}_tiny", width=2) for name in FOUR_STAGES},
    "wrn10_1": partial(WideResNet, blocks=1, widening=1),
    "wrn40_2": partial(build_model, "wrn40_2"),
    "densenet": partial(DenseNet, blocks=(2, 3, 2, 1), growth=4),
}


def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Copy state in its order, with batch norms that are not those of a fresh network."""
    rng = torch.Generator().manual_seed(0)
    pairs = list(zip(source.state_dict().items(), target.state_dict().values(), strict=True))
    for (name, value), copy in pairs:
        if name.endswith("running_mean"):
            value.normal_(generator=rng)
        elif name.endswith("running_var"):
            value.uniform_(0.5, 2, generator=rng)
        copy.copy_(value)


@pytest.mark.parametrize("blocks", [*THREE_STAGES, *FOUR_STAGES])
def test_depth_is_what_the_name_says(blocks: int | str):
    name = f"resnet{blocks}" if isinstance(blocks, int) else blocks
    with torch.device("meta"):
        model = build_model(name, 10, width=1)
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and "short" not in n]
    assert len(layers) + 1 == int(name.removeprefix("resnet").split("_")[0])  # and the classifier


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_official_networks(name: str):
    with torch.device("meta"):
        model = build_model(name, 10)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_parameters_by_hand():
    # Width 1, 2 classes. Stem 27 + 2; stage 1: 2 (9 + 2); stage 2: 18 + 36 + 2 + two norms of 4
    # and its norm of 4; stage 3: 72 + 144 + 8 + three norms of 8; classifier 4 x 2 + 2.
    model = build_model("resnet8", 2, width=1)
    expected = 29 + 22 + (56 + 12) + (224 + 24) + 10
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [32, 64])
def test_logits_are_the_classifier_of_the_features(name: str, size: int):
    model = SMALL[name](7).eval()
    images = torch.rand(2, 3, size, size)
    with torch.no_grad():
        logits, features = model(images)
        assert logits.shape == (2, 7)
        assert features.shape == (2, model.num_features)
        assert (features >= 0).all()
        torch.testing.assert_close(model.features(images), features)
        torch.testing.assert_close(model.classifier(features), logits)


@pytest.mark.parametrize("name", ["BasicBlock", "Bottleneck"])
def test_resnet_equals_torchvision_behind_a_small_stem(name: str):
    model = ResNet(
        10,
        block=getattr(convnets, name),
        blocks=(1, 2, 1, 1),
        widths=(64, 128, 256, 512),
        stem_width=64,
    )
    peer = torchvision.models.ResNet(
        getattr(torchvision.models.resnet, name), [1, 2, 1, 1], num_classes=10
    )
    peer.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    peer.maxpool = nn.Identity()
    copy_values(model, peer)
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images)[0], peer.eval()(images))


@pytest.mark.parametrize("channels", [2, 7, 8])
def test_a_strided_pointwise_convolution_is_torchs_whatever_its_width(channels):
    layer = Pointwise(channels, 16, stride=2)
    peer = nn.Conv2d(channels, 16, 1, stride=2, bias=False)
    peer.load_state_dict(layer.state_dict())
    images = torch.randn(25, channels, 15, 15).to(memory_format=torch.channels_last)
    output, expected = layer(images), peer(images)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()  # without a crash
    (gradient,) = torch.autograd.grad(peer.double()(images.double()).square().sum(), peer.weight)
    torch.testing.assert_close(layer.weight.grad, gradient.float(), rtol=1e-4, atol=1e-2)


def test_a_resnet_for_large_images_equals_torchvision():
    model, peer = build_model("resnet18", 10, stem="imagenet"), torchvision.models.resnet18()
    peer.fc = nn.Linear(512, 10)
    copy_values(model, peer)
    images = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images)[0], peer.eval()(images))


def test_densenet_equals_torchvision_behind_a_small_stem():
    blocks = (2, 3, 2, 1)
    model = DenseNet(10, blocks=blocks, growth=4)
    peer = torchvision.models.DenseNet(4, blocks, num_init_features=8, num_classes=10)
    peer.features.conv0 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    for name in ("norm0", "relu0", "pool0"):
        setattr(peer.features, name, nn.Identity())
    copy_values(model, peer)
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images)[0], peer.eval()(images))


@pytest.mark.parametrize(("channels_in", "stride"), [(8, 1), (4, 1), (8, 2)])
def test_pre_activation_block_equals_timm(channels_in: int, stride: int):
    block = PreActivationBlock(channels_in, 8, stride=stride).eval()
    peer = PreActBasic(
        channels_in,
        8,
        stride=stride,
        conv_layer=lambda *size, dilation=1, groups=1, **options: nn.Conv2d(
            *size, padding=size[2] // 2, bias=False, **options
        ),
        norm_layer=BatchNormAct2d,
        proj_layer=DownsampleConv,
    ).eval()
    names = [name.replace("shortcut", "downsample.conv") for name in block.state_dict()]
    peer.load_state_dict(dict(zip(names, block.state_dict().values(), strict=True)))
    x = torch.randn(2, channels_in, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(block(x), peer(x))


def test_the_tiny_networks_see_four_places_of_the_last_map():
    plain, tiny = (build_model(name, 5, width=2).eval() for name in ("resnet18", "resnet18_tiny"))
    tiny.features.load_state_dict(plain.features.state_dict())
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = tiny.features(images)
        torch.testing.assert_close(features.view(2, 16, 4).mean(2), plain.features(images))
    assert tiny.num_features == 4 * plain.num_features == 64


@pytest.mark.parametrize("name", ["lenet", "resnet8", "resnet50_tiny", "wrn10_1"])
def test_every_parameter_learns(name: str):
    model = SMALL[name](4)
    logits, _ = model(torch.rand(8, 3, 32, 32))
    nn.functional.cross_entropy(logits, torch.arange(8) % 4).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", [name for name in MODELS if name != "timm"])
def test_every_parameter_is_frozen_once_from_the_output_down(name: str):
    with torch.device("meta"):
        model = build_model(name, 10)
    order = model.freezing_order()
    frozen = [id(parameter) for part in order for parameter in part.parameters()]
    assert sorted(frozen) == sorted(id(parameter) for parameter in model.parameters())
    assert order[0] is model.classifier
    assert order[-1] is next(model.features.children())
    positions = {id(module): position for position, (_, module) in enumerate(model.named_modules())}
    order_positions = [positions[id(part)] for part in order[1:]]
    assert order_positions == sorted(order_positions, reverse=True)


@pytest.mark.parametrize(
    ("name", "parts"), [("lenet", 5), ("resnet18", 10), ("resnet50", 18), ("densenet121", 10)]
)
def test_how_many_parts_can_be_frozen(name: str, parts: int):
    with torch.device("meta"):
        assert len(build_model(name, 10).freezing_order()) == parts


@pytest.mark.parametrize(
    ("name", "classes", "params", "text"),
    [
        (
            "resnet51",
            10,
            {},
            r"model\.name = resnet51: did you mean resnet56\? choose one of lenet, .*timm$",
        ),
        ("resnet8", 10, {"depth": 3}, r"model\.depth: unknown setting; did you mean model\.width"),
        ("resnet8", 10, {"blocks": 3}, r"model\.blocks: unknown setting"),
        (
            "resnet8",
            10,
            {"width": 0},
            r"model\.width = 0: input should be greater than or equal to 1",
        ),
        ("resnet8", 10, {"width": 1.5}, r"model\.width = 1\.5: input should be a valid integer"),
        (
            "resnet50",
            10,
            {"width": 0},
            r"model\.width = 0: input should be greater than or equal to 1",
        ),
        ("wrn26_10", 10, {"width": 2}, r"model\.width: unknown setting"),
        ("resnet50", 10, {"stem": "7x7"}, r"model\.stem = '7x7': choose one of small, imagenet"),
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
