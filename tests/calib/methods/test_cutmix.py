"""CutMix: where the pixels come from, and how much of the label with them."""

import pytest
import torch

from calib.losses import build_loss
from calib.methods import build_method

CE = build_loss("ce", 5)


@pytest.mark.parametrize("seed", range(8))
def test_a_box_of_the_image_before_and_its_share_of_the_label(linear, make_batch, peer, seed):
    batch = make_batch(seed=seed)
    torch.manual_seed(seed)
    outcome = build_method("cutmix", 5)(linear, batch, CE)
    before = batch.images.roll(1, 0)
    foreign = (linear.seen[-1] != batch.images).any(-1).any(0)  # [S, S]: the box, of all images
    assert torch.equal(torch.where(foreign[..., None], before, batch.images), linear.seen[-1])
    rows, columns = foreign.any(1), foreign.any(0)
    assert foreign.sum() == rows.sum() * columns.sum()  # it is a rectangle
    share = 1 - foreign.double().mean().item()
    one_hot = torch.from_numpy(peer.one_hot(batch.targets))
    labels = (share * one_hot + (1 - share) * one_hot.roll(1, 0)).numpy()
    expected = peer.cross_entropy(peer.logits(linear, linear.seen[-1]), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    assert outcome.targets.tolist() == labels.argmax(1).tolist()


def test_boxes_differ_between_seeds_alone(linear, make_batch):
    method, batch, losses = build_method("cutmix", 5), make_batch(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(method(linear, batch, CE).loss.item())
    assert losses[0] == losses[1] != losses[2]
