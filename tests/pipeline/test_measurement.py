"""What real images measure: in a stream what all at once say, the spread that is the scale."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data.store import Store
from pipeline.annotate import class_prototypes
from pipeline.measurement import Measurement, WeightVariance, coinciding, measured

CLASSES, WIDTH = 5, 7


def real_features(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (count,), generator=rng)
    centres = 1 + torch.randn(CLASSES, WIDTH, generator=rng)
    return centres[targets] + torch.randn(count, WIDTH, generator=rng), targets


def in_batches(features, targets, size=23):
    return list(zip(features.split(size), targets.split(size), strict=True))


def numpy_variance(features, targets, means, prototypes) -> float:
    """The definition in plain loops: each real image, on the line to each other class."""
    squares = []
    for feature, own in zip(features, targets, strict=True):
        for other in range(len(prototypes)):
            if other != own:
                axis = prototypes[own] - prototypes[other]
                squares.append(((feature - means[own]) @ axis / (axis @ axis)) ** 2)
    return float(np.mean(squares))


def test_a_stream_measures_what_all_features_at_once_say():
    features, targets = real_features()
    found = measured(in_batches(features, targets), CLASSES)
    assert torch.equal(found.prototypes, class_prototypes(features, targets, CLASSES))
    f, t = features.double().numpy(), targets.numpy()
    means = np.stack([f[t == k].mean(0) for k in range(CLASSES)])
    np.testing.assert_allclose(found.prototypes, means, rtol=1e-6)
    assert found.variance == pytest.approx(numpy_variance(f, t, means, means), rel=1e-5)


def test_unit_features_have_prototypes_and_a_spread_of_their_own():
    features, targets = real_features()
    found = measured(in_batches(features, targets), CLASSES)
    f = features.double().numpy()
    f, t = f / np.linalg.norm(f, axis=1, keepdims=True), targets.numpy()
    means = np.stack([f[t == k].mean(0) for k in range(CLASSES)])
    units = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(found.unit, units, rtol=1e-5)
    assert found.unit_variance == pytest.approx(numpy_variance(f, t, means, units), rel=1e-5)
    assert found.scale("auto") != found.scale("auto", normalize=True)


def test_order_and_batches_do_not_show():
    features, targets = real_features()
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(1))
    one = measured(in_batches(features, targets), CLASSES)
    other = measured(in_batches(features[order], targets[order], 64), CLASSES)
    assert torch.equal(one.prototypes, other.prototypes)
    assert one.variance == pytest.approx(other.variance, rel=1e-12)


def test_prototypes_that_coincide_are_found_and_have_no_spread():
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-6]])
    assert coinciding(vectors) == (0, 2)
    assert coinciding(vectors[:2]) is None
    spread = WeightVariance(vectors, vectors)
    spread.add(vectors + 0.1, torch.tensor([0, 1, 2]))
    assert spread.value() == float("inf")


@pytest.mark.process
def test_memory_does_not_grow_with_the_images(tmp_path):
    """60,000 features of 512 numbers would be 120 MB; they pass through a few."""
    script = tmp_path / "stream.py"
    script.write_text(
        """
import sys
import numpy as np, psutil, torch
from data.real import ImageSplit
from data.store import Store
from pipeline.measurement import measured
from pipeline.survey import FeatureChunks

matrix = torch.randn(192, 512, generator=torch.Generator().manual_seed(0))

def run(count, folder):
    split = ImageSplit(
        np.arange(count) % 10,
        load=lambda i: np.random.default_rng(int(i[0])).integers(
            0, 256, (len(i), 8, 8, 3), dtype=np.uint8
        ),
        content=lambda: "",
    )
    held = []  # of this process after each batch; what the system calls peak is its parent's too

    def encode(images):
        held.append(psutil.Process().memory_info().rss / 1e6)
        return images.flatten(1).float() @ matrix

    chunks = FeatureChunks(split, encode, Store(sys.argv[1]), folder, size=1024, batch=256)
    measured(chunks, 10)
    return max(held)

small = run(4_000, "small")
print(run(60_000, "large") - small)
"""
    )
    found = subprocess.run(
        [sys.executable, script, tmp_path / "store"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(found.stdout) < 40  # MB
    assert len(Store(str(tmp_path / "store")).list("large")) == 59


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
