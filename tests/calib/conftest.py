"""A small mixed dataset and small settings for training tests."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from semix.calib.config import TrainConfig
from semix.calib.real_data import open_data
from semix.calib.run_folder import claim_run
from semix.calib.stage_one import BaseStage
from semix.calib.study import StudyConfig
from semix.data.images import encode_image
from semix.data.real import RealDataConfig, load_real
from semix.data.settings import load_settings
from semix.data.tar import GroupSample
from tests import handmade
from tests.calib.measured import STUDY, make_runs

SIZE = 16
REAL = {"name": "digits", "image_size": SIZE, "train_per_class": 6, "validation_per_class": 5}
ALPHAS = [0.0, 0.3, 0.7, 1.0]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread only slows models this small, and the last bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def mixed_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root of 45 series of 4 images, one per pair of digits; plain blends stand in for mixing."""
    real = load_real(RealDataConfig(**REAL))
    pictures = [real.train.images(real.train.targets == k)[0].astype(float) for k in range(10)]
    samples = []
    for number, pair in enumerate(itertools.combinations(range(10), 2)):
        blends = [a * pictures[pair[0]] + (1 - a) * pictures[pair[1]] for a in ALPHAS]
        labels = [[[pair[0], a], [pair[1], 1 - a]] for a in ALPHAS]
        fields = {"classes": list(pair), "alphas": ALPHAS, "weights": ALPHAS, "labels": labels}
        record = handmade.series_of(handmade.record(number, **fields))
        images = [encode_image(image.round().astype(np.uint8), "webp") for image in blends]
        samples.append(GroupSample(record, images, "webp"))
    return handmade.root_of(tmp_path_factory.mktemp("mixed"), samples, real.class_names).url


@pytest.fixture(scope="session")
def make_config(mixed_url: str) -> Callable[..., TrainConfig]:
    """make_config(*overrides): everything at once, small: mixed images, FeDLaS, a masked head."""

    def make(*overrides: str) -> TrainConfig:
        values: dict[str, Any] = {
            "name": "all",
            "real": REAL,
            "mixed": {"url": mixed_url},
            "loss": {"name": "fedlas_ls"},
            "model": {"name": "resnet8", "width": 2},
            "epochs": 4,
            "batch_size": 20,
            "augment": {"shift": 1},
            "optimiser": {"name": "adamw", "learning_rate": 0.01, "schedule": "cosine"},
            "head": {"epochs": 4, "batch_size": 20},
            "checkpoint_every": 1,
            "evaluation": {"bootstrap": 50},
        }
        return load_settings(TrainConfig, values, overrides)

    return make


@pytest.fixture
def make_run(make_config: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., Path]:
    """make_run(name, *overrides): a run folder that holds only its settings."""

    def make(name: str, *overrides: str) -> Path:
        return claim_run(make_config(*overrides), tmp_path / name).parent

    return make


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """An accelerator that takes over no precision from an earlier test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def make_stage(
    make_config: Callable[..., TrainConfig], accelerator: Accelerator
) -> Callable[..., Any]:
    """make_stage(*overrides, seed=0): stage one before its first epoch."""

    def make(*overrides: str, seed: int = 0) -> BaseStage:
        config = make_config(*overrides)
        return BaseStage(config, open_data(config), seed=seed, accelerator=accelerator)

    return make


@pytest.fixture
def make_study() -> Callable[..., StudyConfig]:
    """make_study(*overrides): one dataset and three methods, two of which share stage one."""

    def make(*overrides: str) -> StudyConfig:
        return load_settings(StudyConfig, copy.deepcopy(STUDY), overrides)

    return make


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of two seeds: CE, and CSM with a MaC-Cal head."""
    return make_runs(tmp_path)
