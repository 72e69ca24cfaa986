import math

import numpy as np
import pytest
import torch

from data.labels import sharpen
from pipeline.annotate import (
    Annotator,
    Encoders,
    class_prototypes,
    projection_weight,
    similarity_labels,
)
from pipeline.annotation.measurement import Measurement
from pipeline.annotation.space import Space
from pipeline.annotation.statistics import WeightVariance
from pipeline.config import AnnotationConfig
from pipeline.simplex import simplex_projection

TRIANGLE = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]])


def annotator(config: AnnotationConfig, *prototypes, scales=(4.0, 4.0)) -> Annotator:
    """Of features alone: its CLIP models are never loaded."""
    spaces = {
        name: Space(vectors, scale, config.rule, config.temperature, config.normalize)
        for name, vectors, scale in zip(("features", "second"), prototypes, scales, strict=False)
    }
    return Annotator(config, spaces, Encoders(config, device="cpu"))


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


def test_automatic_scale_is_the_inverse_variance_within_bounds():
    def scale(variance: float, configured: float | str = "auto") -> float:
        return Measurement(torch.zeros(2, 1), torch.zeros(2, 1), variance, 0.5).scale(configured)

    assert scale(0.125) == 8.0
    assert scale(1e-9) == 20.0
    assert scale(0.0) == 20.0
    assert scale(100.0) == 1.0
    assert scale(math.inf) == 1.0
    assert scale(0.125, 2.3) == 2.3
    measurement = Measurement(torch.zeros(2, 1), torch.zeros(2, 1), 0.125, 0.5)
    assert measurement.scale("auto", normalize=True) == 2.0


def test_automatic_scale_makes_labels_the_posterior_of_two_gaussians():
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(40_000) % 2
    centres = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    features = centres[targets] + torch.randn(40_000, 2, generator=generator)
    spread = WeightVariance(centres, centres)
    spread.add(features, targets)
    scale = 1 / spread.value()
    at = torch.tensor([[1.4, 3.0]])
    label = sharpen(projection_weight(at, centres[:1], centres[1:]), scale)
    # Densities of the two classes at x = 1.4, both of variance 1 around 2 and 0.
    near, far = torch.exp(torch.tensor(-(0.6**2) / 2)), torch.exp(torch.tensor(-(1.4**2) / 2))
    torch.testing.assert_close(label, (near / (near + far))[None], atol=0.01, rtol=0)


def test_a_pair_by_hand():
    """At the first prototype, at the second, and twice as far as the first."""
    features = {"features": torch.tensor([[0.0, 2, 0], [0, 0, 2], [0, 4, -2]])}
    found = annotator(AnnotationConfig(), TRIANGLE).annotate(
        features, classes=(1, 2), mixture=((1, 0), (0, 1), (0.5, 0.5))
    )
    assert found["weights"] == [1.0, 0.0, 2.0]
    assert [[k for k, _ in row] for row in found["labels"]] == [[1, 2]] * 3
    first = [row[0][1] for row in found["labels"]]
    np.testing.assert_allclose(first, [0.880797, 0.119203, 0.997527], atol=1e-6)
    np.testing.assert_allclose([sum(p for _, p in row) for row in found["labels"]], 1, atol=1e-6)
    assert set(found) == {"weights", "labels"}


def test_the_mixing_ratio_labels_by_the_conditioning_alone():
    features = {"features": torch.tensor([[0.0, 2, 0], [0, 0, 2]])}
    found = annotator(AnnotationConfig(rule="mixing_ratio"), TRIANGLE).annotate(
        features, classes=(1, 2), mixture=((0.25, 0.75), (1, 0))
    )
    assert found["labels"] == [[[1, 0.25], [2, 0.75]], [[1, 1.0], [2, 0.0]]]
    assert found["weights"] == [1.0, 0.0]


@pytest.mark.parametrize("temperature", [None, 0.2])
def test_similarity_labels_name_all_classes(temperature):
    features = torch.tensor([[0.5, 2, 0.1], [0.1, 0.3, 2]])
    config = AnnotationConfig(rule="similarity", temperature=temperature)
    found = annotator(config, TRIANGLE).annotate(
        {"features": features}, classes=(1, 2), mixture=((1, 0), (0, 1))
    )
    expected = similarity_labels(features, TRIANGLE, temperature)
    assert found["labels"] == [[[k, p] for k, p in enumerate(row)] for row in expected.tolist()]
    assert found["weights"] == pytest.approx([0.975, 0.075])  # the projection stays


@pytest.mark.parametrize("rule", ["simplex", "mixing_ratio", "similarity"])
def test_three_classes(rule):
    features = torch.tensor([[0.0, 2, 0], [1, 1, 3]])
    mixture = ((0, 1, 0), (0.2, 0.3, 0.5))
    found = annotator(AnnotationConfig(rule=rule), TRIANGLE).annotate(
        {"features": features}, classes=(0, 1, 2), mixture=mixture
    )
    # The plane of the three prototypes is x + y + z = 2; (1, 1, 3) falls on (0, 0, 2).
    np.testing.assert_allclose(found["coordinates"], [[0, 1, 0], [0, 0, 1]], atol=1e-6)
    assert found["weights"] == [row[0] for row in found["coordinates"]]
    labels = [[p for _, p in row] for row in found["labels"]]
    expected = {
        "simplex": simplex_projection(features, TRIANGLE).tolist(),
        "mixing_ratio": [list(map(float, row)) for row in mixture],
        "similarity": similarity_labels(features, TRIANGLE, None).tolist(),
    }
    assert labels == expected[rule]


def test_features_that_are_not_numbers_are_named():
    features = {"features": torch.tensor([[0.0, 2, 0], [0, math.nan, 2]])}
    with pytest.raises(FloatingPointError, match="the CLIP features of image 1 are not finite"):
        annotator(AnnotationConfig(), TRIANGLE).annotate(
            features, classes=(1, 2), mixture=((1, 0), (0, 1))
        )


def test_stored_features_are_taken_as_they_are():
    features = torch.tensor([[0.0, 2, 0], [0, 0.5, 2]]).half()
    found = annotator(AnnotationConfig(), TRIANGLE).annotate(
        {"features": features}, classes=(1, 2), mixture=((1, 0), (0, 1))
    )
    assert found["weights"] == [1.0, 0.125]
