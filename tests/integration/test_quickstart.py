"""The whole quickstart, killed while it builds: it goes on, and its images are as requested."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from semix.data.dataset import MixedDataset
from semix.data.quality import end_points, endpoint_agreement, series_quality
from semix.flows.quickstart import METHODS, RANDOM, SELECTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def start_quickstart(out: Path) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "semix.flows.cli",
        "quickstart",
        "--out",
        str(out),
        "--seeds",
        "1",
    ]
    log = (out.parent / "printed").open("a")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("story") / "quickstart"
    killed = start_quickstart(folder)
    while not list(folder.glob(f"{RANDOM}/shards/*/*.tar")):
        assert killed.poll() is None, (folder.parent / "printed").read_text()
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    models = list((folder / "standins").glob("*/diffusion"))
    tars = {path: path.stat().st_mtime_ns for path in folder.glob(f"{RANDOM}/shards/*/*.tar")}
    assert start_quickstart(folder).wait() == 0, (folder.parent / "printed").read_text()
    assert list((folder / "standins").glob("*/diffusion")) == models
    assert {path: path.stat().st_mtime_ns for path in tars} == tars
    return folder


@pytest.fixture(scope="module")
def mixed(out) -> MixedDataset:
    return MixedDataset(str(out / RANDOM))


def flat(images) -> np.ndarray:
    return np.asarray(images).reshape(len(images), -1) / 255


def test_every_method_is_in_its_report(out):
    report = json.loads((out / "report.json").read_text())
    assert len(report["methods"]) == len(METHODS) + 1  # a head stage is a method of its own
    assert (out / "report.html").is_file() and (out / "series.png").is_file()
    assert len(MixedDataset(str(out / SELECTED)).weights) == 135


def test_a_second_run_makes_nothing(out):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert start_quickstart(out).wait() == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_end_points_show_their_class_to_one_who_saw_real_digits_only(mixed, digits):
    judge = SVC().fit(flat(digits.train.images()), digits.train.targets)
    assert judge.score(flat(digits.test.images()), digits.test.targets) > 0.95
    group, position, intended = end_points(mixed.mixtures, mixed.classes)
    predicted = torch.from_numpy(judge.predict(flat(mixed.images[group, position])))
    agreement = endpoint_agreement(predicted, intended)
    assert agreement["images"] == 270
    assert agreement["share"] >= 0.9


def test_clip_weights_follow_alpha(mixed):
    quality = series_quality(mixed.alphas, mixed.weights)
    assert quality.series == 135
    assert quality.median >= 0.9


def test_images_between_the_ends_are_between_them(mixed):
    """Images inside a series copy neither end: their CLIP weights lie between."""
    between = ((mixed.weights > 0.1) & (mixed.weights < 0.9)).any(dim=1)
    assert between.float().mean() > 0.5
