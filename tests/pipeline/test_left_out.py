"""A flat or non-finite series is left out of its shard; all its other series stay.

Real builds, in which the network breaks down on the noise of some groups.
"""

from collections.abc import Callable

import pytest
import torch

from semix.data.contact_sheet import read_series, sample_series
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.fingerprint import hashed_seed
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.verify import verify
from semix.pipeline.audit import audit
from semix.pipeline.audit.page import write_page
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators.latent_diffusion import LatentDiffusion
from semix.pipeline.noise import initial_noise
from semix.pipeline.plan import BuildPlan
from semix.pipeline.regeneration import regenerate
from semix.pipeline.relabel import relabelled_config
from semix.pipeline.worker import SOME_FAILED
from tests.pipeline.roots import (
    altered,
    bake,
    begun,
    by_group,
    features,
    made,
    relabel,
    samples,
    tars,
    work,
)

NAN, FLAT = float("nan"), 0.25
REASONS = {
    NAN: "latents 0 has NaN or infinite values; try another dtype",
    FLAT: "latents 0 is one flat value (0.25)",
}


def rows_of(noise: torch.Tensor, seeds: list[int]) -> torch.Tensor:
    """Whether each row of `noise` is the initial noise of one of the seeds, bool [B]."""
    expected = initial_noise(seeds, noise.shape[1:]).to(noise)
    return (noise[:, None] == expected).flatten(2).all(2).any(1)


@pytest.fixture
def broken(monkeypatch) -> Callable[..., None]:
    """broken(config, {group: value}): sampling from the noises of these groups gives that value."""

    def install(config: BuildConfig, values: dict[int, float]) -> None:
        plan, sample = BuildPlan(config), LatentDiffusion.sample

        def breaking(self, noise, condition):
            latents = sample(self, noise, condition).clone()
            for group, value in values.items():
                latents[rows_of(noise, [plan.group(group).seed])] = value
            return latents

        monkeypatch.setattr(LatentDiffusion, "sample", breaking)

    return install


@pytest.fixture
def incomplete(hasty_config, broken, tmp_path) -> Root:
    """An indexed root without group 20, which is in the middle of shard 3."""
    broken(hasty_config, {20: NAN})
    root = made(hasty_config, tmp_path / "lacking")
    root.write_index()
    return root


@pytest.mark.parametrize("value", REASONS, ids=["nan", "flat"])
def test_one_series_is_left_out_and_named(hasty_config, built, broken, tmp_path, value):
    broken(hasty_config, {20: value})
    root = made(hasty_config, tmp_path / "root", "--shards", "2-3")
    record = root.record(3)
    assert [(s.group, s.reason) for s in record.left_out] == [(20, REASONS[value])]
    assert (record.groups, record.group_numbers) == (5, [18, 19, 21, 22, 23])
    assert root.record(2).left_out == []
    series, expected = samples(root), samples(built)
    assert series == {group: expected[group] for group in range(12, 24) if group != 20}
    expected_features = features(built, 3)["features"][[0, 1, 3, 4, 5]]
    assert torch.equal(features(root, 3)["features"], expected_features)
    assert list(verify(root, full=True)) == []


def test_status_training_and_looks_know_of_it(incomplete):
    state = incomplete.progress()
    assert (state.done, incomplete.totals().left_out, state.groups_done) == (8, 1, 45)
    assert len(MixedDataset(incomplete.url)) == len(MixedDataset(incomplete.url).images) == 44
    assert 20 not in sample_series(incomplete, 44)
    for read in (lambda: read_series(incomplete, [19, 20]), lambda: regenerate(incomplete, 20)):
        with pytest.raises(InputError, match=rf"^group = 20: .*: {REASONS[NAN]}$"):
            read()
    assert regenerate(incomplete, 21, device="cpu") == samples(incomplete)[21]


def test_more_than_are_allowed_fail_their_shard_and_are_named(
    hasty_config, built, broken, tmp_path, monkeypatch
):
    broken(hasty_config, {18: FLAT, 23: NAN})
    root = begun(hasty_config, tmp_path / "root")
    assert work(root) == SOME_FAILED
    assert root.missing() == [3]
    failure = root.failures()[3][0]
    assert failure.error == "ValueError"
    assert failure.message == (
        "2 series or more of 6 cannot be stored, shards.max_left_out allows 1: "
        f"group 18: {REASONS[FLAT]}; group 23: {REASONS[NAN]}"
    )
    assert work(root, "--set", "shards.max_left_out=0.4") == 0  # here and now, for this root
    assert [s.group for s in root.record(3).left_out] == [18, 23]
    root.discard(3)
    monkeypatch.undo()
    assert work(root) == 0
    assert tars(root) == tars(built)
    assert root.record(3).attempt == 2


def test_where_none_may_be_left_out_one_fails_its_shard(hasty_config, broken, tmp_path):
    config = altered(hasty_config, "shards.max_left_out=0")
    broken(config, {20: NAN})
    root = begun(config, tmp_path / "root")
    assert work(root, "--shards", "3-4") == SOME_FAILED
    assert root.done() == [4]
    message = root.failures()[3][0].message
    assert message.endswith(f"shards.max_left_out allows 0: group 20: {REASONS[NAN]}")


def test_a_shard_of_one_series_is_never_left_empty(make_config, hasty_standins, broken, tmp_path):
    config = make_config(hasty_standins, "shards.groups_per_shard=1", "shards.max_left_out=0.5")
    broken(config, {2: NAN})
    root = begun(config, tmp_path / "root")
    assert work(root, "--shards", "1-2") == SOME_FAILED
    assert root.done() == [1]
    assert root.failures()[2][0].group == 2


def test_features_that_are_no_numbers_leave_their_series_out(hasty_config, tmp_path, monkeypatch):
    root, encode, calls = begun(hasty_config, tmp_path / "root"), ClipEncoder.encode, []

    def overflowing(self, images):
        calls.append(len(images))
        output = encode(self, images).clone()
        if len(calls) == 2:  # the last two groups of shard 0
            output[5] = 1e6  # a number, but none that float16 has
        return output

    monkeypatch.setattr(ClipEncoder, "encode", overflowing)
    assert work(root, "--shards", "0") == 0
    assert [(s.group, s.reason) for s in root.record(0).left_out] == [
        (5, "the CLIP features of image 1 are not finite, or too large for float16")
    ]
    assert features(root, 0)["features"].isfinite().all()
    assert list(verify(root, full=True)) == []


SELECTION = ("noise.candidates=2", "noise.steps=1", "noise.alphas=[0.5]", "noise.max_cost=99")


@pytest.mark.parametrize("strategy", ["select", "optimise"])
def test_a_series_whose_noises_have_no_score_is_left_out(
    make_config, hasty_standins, tmp_path, monkeypatch, strategy
):
    more = ("noise.iterations=1", f"noise.strategy={strategy}", "shards.groups_per_batch=2")
    config = make_config(hasty_standins, *SELECTION, *more)
    seeds = [BuildPlan(config).group(3).seed, hashed_seed(0, "group", 3, 1)]
    predict = LatentDiffusion.predict

    def breaking(self, latents, timestep, condition, guidance_scale):
        output = predict(self, latents, timestep, condition, guidance_scale)
        hit = rows_of(latents.detach(), seeds)[:, None, None, None]
        return torch.where(hit, torch.nan, output)

    monkeypatch.setattr(LatentDiffusion, "predict", breaking)
    root = made(config, tmp_path / "root", "--shards", "0")
    reason = "no noise has a stability: the network gave NaN; try another dtype"
    assert [(s.group, s.reason) for s in root.record(0).left_out] == [(3, reason)]
    assert all(sample.record.stability is not None for sample in samples(root).values())
    with pytest.raises(InputError, match=rf"^group = 3: cannot be stored: {reason}$"):
        regenerate(root, 3, device="cpu")


def test_further_labels_are_of_what_is_there(incomplete, other_clip):
    groups = [group for group in range(45) if group != 20]
    for change in ("scale=4.0", f"model=local-dir:{other_clip}"):
        labels = relabel(incomplete, change)
        assert (labels.missing(), labels.failures()) == ([], {})
        assert list(by_group(labels)) == groups


def test_a_baked_root_says_the_same(incomplete, tmp_path):
    labels = relabel(incomplete, "scale=4.0")
    config = relabelled_config(incomplete, ["annotation.scale=4.0"])
    baked = bake(incomplete, config, labels, tmp_path / "baked")
    assert baked.record(3).left_out == incomplete.record(3).left_out
    assert list(samples(baked)) == list(samples(incomplete))
    assert list(verify(baked, full=True)) == []
    assert baked.totals().left_out == 1


def test_an_audit_names_it(incomplete, tmp_path):
    result = audit(PinnedRoot(incomplete))
    assert result.values["series"] == 44
    assert result.values["left_out"] == [{"group": 20, "reason": REASONS[NAN]}]
    (check,) = [check for check in result.checks if check.name == "series left out"]
    assert (check.figure, check.ok) == (f"1; group 20: {REASONS[NAN]}", False)
    write_page(tmp_path / "audit.html", result, title="t")
    assert f"1; group 20: {REASONS[NAN]}" in (tmp_path / "audit.html").read_text()


def test_an_audit_of_a_whole_root_has_nothing_to_say_of_it(built):
    result = audit(PinnedRoot(built))
    assert result.values["left_out"] == []
    assert "series left out" not in [check.name for check in result.checks]
