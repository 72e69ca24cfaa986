"""PLP: what is frozen when, and that it stays where it is."""

import pytest
import torch
from torch import Tensor, nn

from calib.losses import build_loss
from calib.methods import build_method
from calib.methods.mixing import freezing_epoch
from calib.models import build_model
from calib.models.base import ImageClassifier

CE = build_loss("ce", 5)


@pytest.mark.parametrize(
    ("parts", "epochs", "gamma", "expected"),
    [
        (4, 8, 1.0, [2, 4, 6]),
        (4, 16, 2.0, [1, 4, 9]),
        (4, 16, 0.5, [8, 11, 13]),
        (10, 350, 1.0, [35, 70, 105, 140, 175, 210, 245, 280, 315]),  # 350 * 0.7 is 244.99...
        (11, 200, 1.0, [18, 36, 54, 72, 90, 109, 127, 145, 163, 181]),  # their ResNet-18
        (4, 2, 1.0, [1, 1, 1]),  # every part is trained for an epoch
    ],
)
def test_freezing_epochs_by_hand(parts, epochs, gamma, expected):
    assert [freezing_epoch(i, parts, epochs, gamma) for i in range(1, parts)] == expected


class Parts(ImageClassifier):
    """Two hidden layers with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = 6
        self.stem = nn.Sequential(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.features = nn.Sequential(nn.Flatten(), self.stem, self.block)
        self.classifier = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(images.float() / 255)

    def freezing_order(self) -> list[nn.Module]:
        return [self.classifier, self.block, self.stem]


@pytest.mark.parametrize(
    "optimiser",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
        lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
    ],
)
def test_frozen_weights_stay_and_statistics_follow(make_batch, optimiser):
    torch.manual_seed(0)
    backbone, method = Parts(), build_method("plp", 5)
    steps = optimiser(backbone.parameters())
    moved = []
    for epoch in range(6):
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        method.start_epoch(backbone, epoch, 6)
        method(backbone, make_batch(seed=epoch), CE).loss.backward()
        method.after_backward(backbone)
        steps.step()
        steps.zero_grad()
        changed = {n for n, v in backbone.state_dict().items() if not torch.equal(v, before[n])}
        assert {"stem.1.running_mean", "block.1.running_mean", "stem.0.weight"} <= changed
        moved.append(("block.0.weight" in changed, "classifier.bias" in changed))
    assert moved == [(True, True)] * 2 + [(True, False)] * 2 + [(False, False)] * 2


def test_what_is_frozen_is_a_function_of_the_epoch_alone():
    resumed = build_method("plp", 5)
    resumed.start_epoch(Parts(), 5, 6)
    assert resumed.frozen == 2
    resumed.start_epoch(Parts(), 0, 6)
    assert resumed.frozen == 0


def test_a_resnet_is_frozen_down_to_its_stem():
    backbone = build_model("resnet8", 5, width=2)
    method = build_method("plp", 5)
    method.start_epoch(backbone, 999, 1000)
    for parameter in backbone.parameters():
        parameter.grad = torch.ones_like(parameter)
    method.after_backward(backbone)
    trained = [name for name, value in backbone.named_parameters() if value.grad is not None]
    assert trained
    assert all(name.startswith("features.stem") for name in trained)
