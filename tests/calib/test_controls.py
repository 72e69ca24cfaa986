"""Controls of CSM: what differs from its draws, and what does not."""

import pytest
import torch
from accelerate import Accelerator

from semix.calib.batches import base_batches
from semix.calib.controls import ControlledDraws
from semix.calib.real_data import open_data
from semix.data.dataset import MixedDataset

COUNT = 2


@pytest.fixture(scope="module")
def mixed(mixed_url) -> MixedDataset:
    return MixedDataset(mixed_url, scale=3.0)  # its images are blends by other weights


def drawn(draws, *, seed: int = 0, count: int = COUNT, classes: int = 10):
    targets = torch.arange(40) % classes
    group, position = draws.choose(
        targets, rng=torch.Generator().manual_seed(seed), count=count, class_matched=True
    )
    return targets, group, position, *draws.read(group, position)


def test_end_points_are_both_ends_with_hard_labels(mixed):
    targets, group, position, images, labels = drawn(ControlledDraws(mixed, "end_points"))
    length = mixed.alphas.shape[1]
    assert set(position.flatten().tolist()) == {0, length - 1}
    assert position.shape == (40, COUNT) and (position[:, 0] != position[:, 1]).all()
    assert torch.equal(images, mixed.read(group, position)[0])
    assert set(labels.unique().tolist()) == {0.0, 1.0} and (labels.sum(-1) == 1).all()
    assert torch.equal(labels[:, 0].argmax(-1), targets)  # the own class first
    others = mixed.classes[group[:, 0]].sum(1) - targets
    assert torch.equal(labels[:, 1].argmax(-1), others)
    assert drawn(ControlledDraws(mixed, "end_points"), count=3)[2].shape == (40, 3)


def test_interior_images_have_their_own_labels(mixed):
    _, group, position, images, labels = drawn(ControlledDraws(mixed, "interior"))
    assert position.shape == (40, COUNT)
    expected = mixed.read(group, position)
    assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])
    by_label = mixed.soft_labels.of_class(group[:, 0], mixed.classes[group[:, 0], 0])
    ends = torch.stack([by_label.argmax(1), by_label.argmin(1)], 1)
    assert not (position[:, :, None] == ends[:, None]).any()


def test_shuffled_labels_are_those_of_other_images_and_stay(mixed):
    draws = ControlledDraws(mixed, "shuffled_labels")
    _, group, position, images, labels = drawn(draws)
    plain = drawn(mixed)
    assert torch.equal(position, plain[2]) and torch.equal(images, plain[3])
    assert not torch.equal(labels, plain[4])
    assert torch.equal(draws.read(group, position)[1], labels)
    length = mixed.alphas.shape[1]
    everything = draws.read(torch.arange(len(mixed))[:, None], torch.arange(length))[1]
    rows = [sorted(map(tuple, each.flatten(0, 1).tolist())) for each in (everything, mixed.labels)]
    assert rows[0] == rows[1]


def test_pixel_mixup_blends_the_ends_by_the_label(mixed):
    draws = ControlledDraws(mixed, "pixel_mixup")
    _, group, position, images, labels = drawn(draws)
    plain = drawn(mixed)
    assert torch.equal(position, plain[2]) and torch.equal(labels, plain[4])
    row = 7
    first, second = (mixed.images[int(group[row, 0]), end].float() for end in (-1, 0))
    share = labels[row, 1, mixed.classes[group[row, 0], 0]]
    expected = (share * first + (1 - share) * second).round()
    assert (images[row, 1].float() - expected).abs().max() <= 1
    assert (images[row, 1].float() - plain[3][row, 1].float()).abs().max() > 10


def test_a_setting_of_the_training_chooses_it(make_config):
    config = make_config("mixed.control=end_points")
    assert config.identity()["mixed"]["control"] == "end_points"
    batches = base_batches(config, open_data(config), Accelerator(cpu=True))
    assert isinstance(batches.mixed, ControlledDraws)
    _, labels = batches.mixed.read(torch.tensor([[3]]), torch.tensor([[0, 3]]))
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    assert "control" not in make_config().identity()["mixed"]
