"""The quickstart's own models: is what they generate what was asked for?"""

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from data.mixed import MixedDataset
from data.quality import end_points, endpoint_agreement, series_quality
from data.settings import load_settings
from flows.quickstart import CONFIGS
from pipeline.config import BuildConfig
from pipeline.prototypes import ensure_prototypes
from pipeline.root import create_root
from pipeline.worker import main as worker


@pytest.fixture(scope="module")
def mixed(standins, tmp_path_factory) -> MixedDataset:
    given = [f"generator.model={standins.diffusion}", f"annotation.model=local-dir:{standins.clip}"]
    config = load_settings(BuildConfig, CONFIGS / "build.yaml", given)
    root = create_root(config, str(tmp_path_factory.mktemp("mixed")))
    ensure_prototypes(root)
    assert worker([root.url]) == 0
    root.write_index()
    return MixedDataset(root.url)


def flat(images) -> np.ndarray:
    return np.asarray(images).reshape(len(images), -1) / 255


def test_end_points_show_their_class_to_one_who_saw_real_digits_only(mixed, digits):
    judge = SVC().fit(flat(digits.train.images()), digits.train.targets)
    assert judge.score(flat(digits.test.images()), digits.test.targets) > 0.95
    group, position, intended = end_points(mixed.mixtures, mixed.classes)
    predicted = torch.from_numpy(judge.predict(flat(mixed.images[group, position])))
    found = endpoint_agreement(predicted, intended)
    assert found["images"] == 270
    assert found["share"] >= 0.9


def test_clip_weights_follow_alpha(mixed):
    found = series_quality(mixed.alphas, mixed.weights)
    assert found.series == 135
    assert found.median >= 0.9


def test_images_between_the_ends_are_between_them(mixed):
    """Not a copy of one end: the middle of a series lies strictly between in CLIP's eyes."""
    between = ((mixed.weights > 0.1) & (mixed.weights < 0.9)).any(dim=1)
    assert between.float().mean() > 0.5
