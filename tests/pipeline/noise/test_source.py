"""A build that selects noise: what the shards record, and that they can be made again."""

import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from semix.data.errors import InputError
from semix.data.fingerprint import hashed_seed
from semix.data.formats import PROTOTYPES
from semix.data.images import decode_image
from semix.data.leases import TIME_TO_LIVE, living
from semix.data.root import Root
from semix.pipeline.conditioning import mix
from semix.pipeline.generators.schedulers import ddim_pair
from semix.pipeline.noise import initial_noise, inversion_stability
from semix.pipeline.noise.source import noise_digest, noise_source
from semix.pipeline.plan import build_of
from semix.pipeline.regeneration import regenerate
from semix.pipeline.shard import load_models, mix_groups
from semix.pipeline.shard_job import BuildJob
from semix.pipeline.worker import Worker
from tests.pipeline.roots import begun, made, plan_of, samples, tars, work

pytestmark = pytest.mark.process  # for its length

# 6 pairs, two series each: 12 groups in 3 shards of 4 and batches of 3, the last of them short.
SETTINGS = (
    "mixing.pairs.kind=sampled",
    "mixing.pairs.count=6",
    "mixing.groups_per_pair=2",
    "shards.groups_per_shard=4",
    "shards.groups_per_batch=3",
    "noise.strategy=select",
    "noise.candidates=3",
    "noise.steps=2",
    "noise.max_cost=1000",
)
OPTIMISE = (
    "noise.strategy=optimise",
    "noise.iterations=1",
    "noise.candidates=2",
    "mixing.pairs.count=1",
)


@pytest.fixture(scope="module")
def build(make_config, hasty_standins, tmp_path_factory):
    """build(*overrides): a finished root, made once for each."""

    @cache
    def build(*overrides: str) -> Root:
        config = make_config(hasty_standins, *SETTINGS, *overrides)
        root = made(config, tmp_path_factory.mktemp("chosen"))
        assert root.store.list("leases") == []
        return root

    return build


@pytest.fixture(scope="module")
def built(build) -> Root:
    return build()


def copy_root(root: Root, folder: Path) -> Root:
    shutil.copytree(root.url, folder / "again")
    return Root(str(folder / "again"))


def stability(models, plan, group, noise) -> torch.Tensor:
    """The stability at alpha 0, 1/2 and 1, [3]."""
    points = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    condition = mix(models.embeddings, group.classes, points)
    pair = ddim_pair(models.generator.denoiser.pipeline.scheduler)
    with torch.inference_mode():
        return inversion_stability(
            noise.expand(3, *noise.shape),
            condition,
            predict=models.generator.predict,
            schedulers=pair,
            steps=2,
        )


def test_each_record_holds_the_scores_and_the_most_stable_is_chosen(built):
    plan = plan_of(built)
    models = load_models(plan, built.store.get(PROTOTYPES), device="cpu")
    counts = Counter()
    for index, sample in samples(built).items():
        note, group = sample.record.noise, plan.group(index)
        seeds = [group.seed, *(hashed_seed(0, "group", group.index, c) for c in (1, 2))]
        best = int(np.argmax(note["scores"]))
        counts[best] += 1
        noise = initial_noise([note["seed"]], models.generator.latent_shape)[0]
        assert note == note | {
            "strategy": "select",
            "candidates": 3,
            "steps": 2,
            "guidance_scale": 1.0,
            "stability": max(note["scores"]),
            "seed": seeds[best],
            "digest": noise_digest(noise),
        }
        per_point = stability(models, plan, group, noise)
        torch.testing.assert_close(torch.tensor(note["per_alpha"]), per_point, atol=1e-4, rtol=0)
        assert note["stability"] == pytest.approx(np.mean(note["per_alpha"]), abs=1e-6)
        assert sample.record.seed == group.seed
    assert len(counts) == 3  # else the choice would be trivial


def test_the_images_come_from_the_recorded_seed(built):
    plan = plan_of(built)
    models = load_models(plan, built.store.get(PROTOTYPES), device="cpu")
    sample = samples(built)[5]
    images, _ = mix_groups(
        [plan.group(5)],
        initial_noise([sample.record.noise["seed"]], models.generator.latent_shape),
        embeddings=models.embeddings,
        generator=models.generator,
        batch_groups=3,
    )
    stored = np.stack([decode_image(image) for image in sample.images])
    assert np.abs(images[0].cpu().numpy().astype(int) - stored).max() <= 1


@pytest.mark.parametrize("overrides", [(), OPTIMISE], ids=["select", "optimise"])
def test_what_is_made_again_is_the_same_to_the_byte(build, tmp_path, overrides):
    """A lost shard by a worker, one of its series by `regenerate`."""
    original = build(*overrides)
    copy = copy_root(original, tmp_path)
    copy.discard(max(original.done()))
    assert work(copy) == 0
    assert tars(copy) == tars(original)
    last, stored = samples(original).popitem()
    assert regenerate(original, last, device="cpu") == stored


def test_leases_are_renewed_while_noise_is_chosen(
    make_config, hasty_standins, tmp_path, monkeypatch
):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    one = ("mixing.pairs.count=1", "shards.groups_per_shard=2", "noise.candidates=16")
    root = begun(make_config(hasty_standins, *SETTINGS, *one), tmp_path)
    expired, leases = [], []

    def heartbeat() -> None:
        """Make all leases old at each heartbeat; they must be renewed before the next."""
        names, now = root.store.list("leases"), root.store.now()
        leases.append({name.split("/")[1] for name in names})
        expired.append(leases[-1] - {Path(name).name for name in living(root.store)})
        for name in names:
            os.utime(f"{root.url}/{name}", (now - 2 * TIME_TO_LIVE,) * 2)

    assert Worker(BuildJob(build_of(root)), 0, 1, device="cpu", heartbeat=heartbeat).run() == 0
    assert leases.count({"0000000.json"}) >= 2
    assert not any(expired)


def test_one_candidate_is_the_random_noise(build):
    few = ("mixing.pairs.count=1",)
    alone, plain = build("noise.candidates=1", *few), build("noise.strategy=random", *few)
    for one, other in zip(samples(alone).values(), samples(plain).values(), strict=True):
        assert one.record.noise["seed"] == one.record.seed
        assert one.images == other.images
        assert other.record.noise == {"strategy": "random", "stability": None}


def test_optimised_noise_is_what_float16_holds(build):
    root = build(*OPTIMISE)
    plan = plan_of(root)
    models = load_models(plan, root.store.get(PROTOTYPES), device="cpu")
    groups = [plan.group(index) for index in range(plan.num_groups)]
    noises, notes, faults = models.noise(groups)
    assert faults == {}
    assert [sample.record.noise for sample in samples(root).values()] == notes
    for group, noise, note in zip(groups, noises, notes, strict=True):
        assert torch.equal(noise, noise.half().float())
        assert noise_digest(noise) == note["digest"]
        assert (note["strategy"], note["seed"], note["iterations"]) == ("optimise", None, 1)
        assert note["start_stability"] == pytest.approx(max(note["scores"]), abs=1e-4)
        assert note["stability"] >= note["start_stability"]
        per_point = stability(models, plan, group, noise)
        torch.testing.assert_close(per_point, torch.tensor(note["per_alpha"]), atol=1e-3, rtol=0)


def test_a_scheduler_that_cannot_be_inverted_is_refused_while_loading(built):
    plan = plan_of(built)
    models = load_models(plan, built.store.get(PROTOTYPES), device="cpu")
    models.generator.denoiser.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(InputError, match=r"noise\.strategy = .*FlowMatchEulerDiscreteScheduler"):
        noise_source(plan, generator=models.generator, embeddings=models.embeddings)


def test_beats_come_while_noise_is_chosen(built):
    plan, heartbeats = plan_of(built), []
    models = load_models(
        plan, built.store.get(PROTOTYPES), device="cpu", heartbeat=lambda: heartbeats.append(1)
    )
    models.noise([plan.group(0)])
    assert len(heartbeats) == 3  # batches: 3 groups x 3 candidates x 3 alphas in at most 12 rows


def test_a_builds_float32_is_never_tf32(make_config, hasty_standins, tmp_path, precisions):
    small = ("mixing.pairs.count=1", "mixing.groups_per_pair=1")
    optimise = ("noise.strategy=optimise", "noise.candidates=1", "noise.iterations=1")
    made(make_config(hasty_standins, *SETTINGS, *small, *optimise), tmp_path / "mixed")
    assert precisions == {"ieee"}
