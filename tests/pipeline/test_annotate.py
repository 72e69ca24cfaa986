import pytest
import torch

from pipeline.annotate import Prototypes, class_prototypes, projection_weight

CAT, DOG = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])


def weight(feature):
    return projection_weight(feature[None], CAT[None], DOG[None])[0]


def test_projection_by_hand_and_unclipped():
    torch.testing.assert_close(weight(CAT), torch.tensor(1.0))
    torch.testing.assert_close(weight(DOG), torch.tensor(0.0))
    torch.testing.assert_close(weight((CAT + DOG) / 2), torch.tensor(0.5))
    torch.testing.assert_close(weight(2 * CAT - DOG), torch.tensor(2.0))
    torch.testing.assert_close(weight(CAT + torch.tensor([5.0, 5.0])), torch.tensor(1.0))


def test_mean_weight_of_the_images_behind_a_prototype_is_one():
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + 3
    targets = torch.arange(40) % 2
    prototypes = class_prototypes(features, targets, 2)
    own = features[targets == 0]
    mean = projection_weight(own, prototypes[0].expand_as(own), prototypes[1].expand_as(own)).mean()
    torch.testing.assert_close(mean, torch.tensor(1.0), atol=1e-5, rtol=0)


def test_prototypes_are_class_means():
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    torch.testing.assert_close(
        class_prototypes(features, torch.tensor([0, 0, 1]), 2),
        torch.tensor([[2.0, 0.0], [0.0, 5.0]]),
    )
    with pytest.raises(ValueError, match="class 2 has no features"):
        class_prototypes(features, torch.tensor([0, 0, 1]), 3)


def test_coinciding_prototypes_define_no_line():
    with pytest.raises(ValueError, match="two class prototypes coincide"):
        projection_weight(CAT[None], DOG[None], DOG[None])


def test_automatic_scale_is_the_inverse_variance_within_bounds():
    assert Prototypes(torch.zeros(2, 1), 0.125).scale("auto") == 8.0
    assert Prototypes(torch.zeros(2, 1), 1e-9).scale("auto") == 20.0
    assert Prototypes(torch.zeros(2, 1), 100.0).scale("auto") == 1.0
    assert Prototypes(torch.zeros(2, 1), 0.125).scale(2.3) == 2.3


def test_automatic_scale_makes_labels_the_posterior_of_two_gaussians():
    from data.labels import sharpen
    from pipeline.annotate import _weight_variance

    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(40_000) % 2
    centres = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    features = centres[targets] + torch.randn(40_000, 2, generator=generator)
    scale = 1 / _weight_variance(features, targets, centres)
    at = torch.tensor([[1.4, 3.0]])
    label = sharpen(projection_weight(at, centres[:1], centres[1:]), scale)
    # Densities of the two classes at x = 1.4, both of variance 1 around 2 and 0.
    near, far = torch.exp(torch.tensor(-(0.6**2) / 2)), torch.exp(torch.tensor(-(1.4**2) / 2))
    torch.testing.assert_close(label, (near / (near + far))[None], atol=0.01, rtol=0)
