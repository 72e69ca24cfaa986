import numpy as np
import pytest
import torch
from scipy.special import softmax

from data.settings import load_settings
from pipeline.annotate import projection_weight, similarity_labels
from pipeline.annotation.rules import total_variation
from pipeline.annotation.space import Space
from pipeline.config import AnnotationConfig

CAT, DOG = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])


def weight(feature):
    return projection_weight(feature[None], CAT[None], DOG[None])[0]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 1


def test_projection_by_hand_and_unclipped():
    torch.testing.assert_close(weight(CAT), torch.tensor(1.0))
    torch.testing.assert_close(weight(DOG), torch.tensor(0.0))
    torch.testing.assert_close(weight((CAT + DOG) / 2), torch.tensor(0.5))
    torch.testing.assert_close(weight(2 * CAT - DOG), torch.tensor(2.0))
    torch.testing.assert_close(weight(CAT + torch.tensor([5.0, 5.0])), torch.tensor(1.0))


def test_coinciding_prototypes_define_no_line():
    with pytest.raises(ValueError, match="two class prototypes coincide"):
        projection_weight(CAT[None], DOG[None], DOG[None])


def test_shares_of_similarity_by_hand():
    """Cosines 1, 0 and 0.6: S000's formula divides them by their sum."""
    prototypes = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.2, 1.6]])
    labels = similarity_labels(torch.tensor([[5.0, 0.0]]), prototypes, None)
    torch.testing.assert_close(labels, torch.tensor([[0.625, 0.0, 0.375]]))


def test_a_negative_cosine_has_no_share():
    prototypes = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]])
    labels = similarity_labels(torch.tensor([[1.0, 0.0]]), prototypes, None)
    assert labels[0, 1] == 0
    torch.testing.assert_close(labels.sum(1), torch.ones(1))
    away = torch.tensor([[1.0, 0.0], [-1.0, -1.0]])
    with pytest.raises(ValueError, match="image 1 has no positive cosine to any prototype; set te"):
        similarity_labels(away, torch.tensor([[1.0, 0.0], [1.0, 1.0]]), None)


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
def test_similarity_with_a_temperature_is_a_softmax_of_cosines(temperature):
    features, prototypes = random(12, 5), random(7, 5, seed=1)
    f, p = features.double().numpy(), prototypes.double().numpy()
    cosine = (f @ p.T) / np.linalg.norm(f, axis=1)[:, None] / np.linalg.norm(p, axis=1)
    found = similarity_labels(features, prototypes, temperature)
    np.testing.assert_allclose(found, softmax(cosine / temperature, axis=1), rtol=2e-4, atol=1e-6)


def test_total_variation_by_hand():
    first = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]])
    second = torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(total_variation(first, second), torch.tensor([0.4, 1.0]))


def test_normalised_features_lie_between_unit_prototypes():
    """Features in the directions of both prototypes, whatever their length, and half-way."""
    space = Space(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 4.0, normalize=True)
    features = torch.tensor([[7.0, 0.0], [0.0, 0.1], [3.0, 3.0]])
    raw, labels = space.label(features, (0, 1))
    torch.testing.assert_close(raw[:, 0], torch.tensor([1.0, 0.0, 0.5]))
    torch.testing.assert_close(labels[:, 0], torch.tensor([0.880797, 0.119203, 0.5]))
    bare = Space(space.prototypes, 4.0)
    torch.testing.assert_close(bare.label(features, (0, 1))[0][:, 0], torch.tensor([4, 0.45, 0.5]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("temperature=0.1", "`temperature` belongs to rule similarity, and only to it"),
        ("temperature=0", "greater than 0"),
        ("rule=cosine", "should be 'projection', 'simplex', 'similarity' or 'mixing_ratio'"),
        ("scale=-1", "must be positive, or auto"),
        ("second={model: ViT-B-32-quickgelu}", "`second` is the first model again; name another"),
        ("second={model: ViT-B-32, pretraned: openai}", "did you mean second.pretrained"),
    ],
)
def test_settings_that_do_not_fit_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        load_settings(AnnotationConfig, {}, [override])


@pytest.mark.parametrize("rule", ["simplex", "similarity", "mixing_ratio"])
def test_a_scale_without_a_projection_is_refused(rule):
    with pytest.raises(ValueError, match="`scale` belongs to rule projection, and only to it"):
        load_settings(AnnotationConfig, {"rule": rule, "scale": 2.0})
    assert load_settings(AnnotationConfig, {"rule": rule}).scale == "auto"
