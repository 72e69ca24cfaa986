"""Series chosen by what a run's classifiers say of their images."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from semix.calib.classifier import load_classifier
from semix.calib.config import ChoiceConfig
from semix.calib.real_data import open_data
from semix.calib.run_folder import claim_run
from semix.calib.series_choice import FOLDER, choose_series, score
from semix.calib.train import train_run
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.fingerprint import fingerprint
from semix.data.images import encode_image
from semix.data.real import load_real
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.data.tar import GroupSample
from tests import handmade
from tests.calib.conftest import ALPHAS, REAL

PLAIN = ("mixed=null", "head=null", "loss.name=ce", "seeds=[0, 1]", "evaluation.bootstrap=0")


@pytest.fixture(scope="module")
def judge(make_config, tmp_path_factory):
    run = claim_run(make_config(*PLAIN), tmp_path_factory.mktemp("judge") / "run").parent
    train_run(run)
    return run


@pytest.fixture
def url(tmp_path):
    """Four series of three images for each pair of three digits, blends of different pictures."""
    real = load_real(RealDataConfig(**REAL))
    samples = []
    pairs = [pair for pair in itertools.combinations(range(3), 2) for _ in range(4)]
    for number, pair in enumerate(pairs):
        ends = [real.train.images(real.train.targets == k)[number % 9].astype(float) for k in pair]
        blends = [a * ends[0] + (1 - a) * ends[1] for a in ALPHAS]
        labels = [[[pair[0], a], [pair[1], 1 - a]] for a in ALPHAS]
        fields = {"classes": list(pair), "alphas": ALPHAS, "weights": ALPHAS, "labels": labels}
        record = handmade.series_of(handmade.record(number, **fields))
        images = [encode_image(image.round().astype(np.uint8), "png") for image in blends]
        samples.append(GroupSample(record, images, "png"))
    return handmade.root_of(tmp_path / "mixed", samples, real.class_names).url


def test_scores_are_what_the_classifiers_say(mixed_url, judge):
    mixed = MixedDataset(mixed_url)
    classifier = load_classifier(judge, calibrator="plain")
    images = mixed.images.flatten(0, 1)
    probabilities = classifier.probabilities(images).view(*mixed.images.shape[:2], -1)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean(1)
    assert torch.allclose(score("uncertainty", mixed, probabilities), entropy, atol=1e-5)
    ordered = probabilities.sort(-1).values
    gap = (ordered[..., -1] - ordered[..., -2]).mean(1)
    assert torch.allclose(score("boundary", mixed, probabilities), 1 - gap, atol=1e-6)
    distance = (probabilities - mixed.labels).abs().sum(-1).mean(1) / 2
    assert torch.allclose(score("disagreement", mixed, probabilities), distance, atol=1e-6)


def test_of_each_pair_the_highest_scores_remain_and_what_was_said_is_kept(url, judge):
    mixed = MixedDataset(url)
    choice = ChoiceConfig(run=str(judge), share=0.5)
    chosen = choose_series(mixed, choice, image_size=16)
    assert [int(mixed.classes[i].sum()) for i in chosen] == [1, 1, 2, 2, 3, 3]
    (name,) = Store(url).list(FOLDER)
    stored = load(Store(url).get(name))["probabilities"].float()
    scores = score("uncertainty", mixed, stored)
    for group in range(0, 12, 4):
        inside = [int(i) for i in chosen if group <= i < group + 4]
        outside = [i for i in range(group, group + 4) if i not in inside]
        assert scores[inside].min() >= scores[outside].max()
    altered = torch.full_like(stored, 0.1).half()
    Store(url).put(name, save({"probabilities": altered}))
    assert choose_series(mixed, choice, image_size=16).tolist() == [0, 1, 4, 5, 8, 9]  # read again
    assert len(choose_series(mixed, ChoiceConfig(run=str(judge), share=1), image_size=16)) == 12


def test_only_chosen_series_are_drawn_and_the_run_records_them(make_config, mixed_url, judge):
    plain = open_data(make_config())
    data = open_data(make_config(f"mixed.choose={{run: {judge}, share: 0.5}}"))
    assert data.mixed.series_digest == fingerprint(
        [plain.mixed.digest, plain.mixed.numbers.tolist()]
    )
    kept = torch.tensor([*range(0, 45, 2), 43])
    data.mixed.draw_only(kept)
    assert data.record["mixed"]["series"] != plain.record["mixed"]["series"]
    rng = torch.Generator().manual_seed(0)
    for matched in (True, False):
        targets = torch.arange(400) % 10
        group, _ = data.mixed.choose(targets, rng=rng, class_matched=matched)
        assert set(group.flatten().tolist()) <= set(kept.tolist())
        if matched:
            assert (data.mixed.classes[group[:, 0]] == targets[:, None]).any(1).all()


def test_a_run_that_cannot_judge_is_refused(make_config, url, judge, tmp_path):
    mixed, choice = MixedDataset(url), ChoiceConfig(run=str(judge))
    with pytest.raises(
        InputError, match=r"mixed\.choose\.run = .*: sees images of 16 pixels, and t"
    ):
        choose_series(mixed, choice, image_size=32)
    with pytest.raises(InputError, match=r"run = .*none: there is no such folder"):
        choose_series(mixed, ChoiceConfig(run=str(tmp_path / "none")), image_size=16)
    data = json.loads((judge / "data.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(judge, other)
    (other / "data.json").write_text(json.dumps(data | {"class_names": ["a", "b"]}))
    with pytest.raises(
        InputError, match=r"choose\.run = .*other: has other classes than the mixed"
    ):
        choose_series(mixed, ChoiceConfig(run=str(other)), image_size=16)
