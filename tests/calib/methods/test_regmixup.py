"""RegMixup against its 2B images and soft labels written in NumPy."""

import numpy as np
import pytest
import torch

from calib.losses import build_loss
from calib.losses.base import RealLoss
from calib.methods import build_method
from calib.methods.mixing import draw_partners, draw_weight

CE = build_loss("ce", 5)


@pytest.mark.parametrize(("variant", "scale"), [("code", 0.5), ("paper", 1.0)])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_clean_half_is_one_hot(linear, make_batch, peer, variant, scale, weight):
    batch = make_batch()
    torch.manual_seed(1)
    outcome = build_method("regmixup", 5, variant=variant, weight=weight)(linear, batch, CE)
    torch.manual_seed(1)
    share, partners = draw_weight(20.0), draw_partners(batch.targets).numpy()
    images, one_hot = batch.images.double(), peer.one_hot(batch.targets)
    blends = share * images + (1 - share) * images[partners]
    blended = share * one_hot + (1 - share) * one_hot[partners]
    torch.testing.assert_close(
        linear.seen[0].double(), torch.cat([images, blends]), atol=1e-3, rtol=0
    )

    halves = [(images, one_hot, 1.0), (blends, blended, weight)]
    expected = sum(w * peer.cross_entropy(peer.logits(linear, x), y) for x, y, w in halves)
    assert outcome.loss.item() == pytest.approx(scale * expected, rel=1e-5)
    outcome.loss.backward()
    gradient = sum(w * peer.weight_gradient(linear, x, y) for x, y, w in halves)
    expected = torch.from_numpy(scale * gradient).float()
    torch.testing.assert_close(linear.layer.weight.grad, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(outcome.targets, batch.targets)


def test_code_is_the_mean_over_all_2b_images(linear, make_batch, peer):
    batch = make_batch()
    torch.manual_seed(1)
    outcome = build_method("regmixup", 5)(linear, batch, CE)
    torch.manual_seed(1)
    share, partners = draw_weight(20.0), draw_partners(batch.targets).numpy()
    one_hot = peer.one_hot(batch.targets)
    labels = np.concatenate([one_hot, share * one_hot + (1 - share) * one_hot[partners]])
    expected = peer.cross_entropy(peer.logits(linear, linear.seen[0]), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)


class Recording(RealLoss):
    def forward(self, logits, targets, *, features=None, indices=None):
        self.seen = logits, targets, features, indices
        return logits.sum() * 0


@pytest.mark.parametrize("name", ["regmixup", "rankmixup", "plp", "plain"])
def test_a_loss_with_features_never_sees_a_blend(linear, make_batch, name):
    batch, loss = make_batch(), Recording()
    build_method(name, 5)(linear, batch, loss)
    logits, targets, features, indices = loss.seen
    expected_logits, expected_features = linear(batch.images)
    torch.testing.assert_close(logits, expected_logits)
    torch.testing.assert_close(features, expected_features)
    assert torch.equal(targets, batch.targets)
    assert torch.equal(indices, batch.indices)
