"""A build whose noise is chosen: what the shards say, and that they can be made again."""

import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from data.errors import InputError
from data.images import decode_image
from data.leases import TIME_TO_LIVE, living
from data.root import Root
from data.shards import read_tar
from pipeline.build import load_models
from pipeline.conditioning import mix
from pipeline.generators.schedulers import ddim_pair
from pipeline.mixing import mix_groups
from pipeline.noise import initial_noise, inversion_stability
from pipeline.noise.bank import noise_digest, unpacked
from pipeline.noise.source import noise_source
from pipeline.plan.seeds import hashed_seed
from pipeline.prototypes import ensure_prototypes
from pipeline.root import create_root, plan_of
from pipeline.work import Building
from pipeline.worker import Worker
from pipeline.worker import main as worker

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


@pytest.fixture(scope="module")
def build(make_config, hasty_standins, tmp_path_factory):
    """build(*overrides): a finished root, made once for each."""

    @cache
    def made(*overrides: str) -> Root:
        config = make_config(hasty_standins, *SETTINGS, *overrides)
        root = create_root(config, str(tmp_path_factory.mktemp("chosen")))
        ensure_prototypes(root, device="cpu")
        assert worker([root.url, "--device", "cpu"]) == 0
        assert root.store.list("leases") == []
        return root

    return made


@pytest.fixture(scope="module")
def built(build) -> Root:
    return build()


def samples(root: Root) -> list:
    found = []
    for record in root.committed().values():
        with root.store.open(record["tar"]) as file:
            found += list(read_tar(file))
    return found


def hashes(root: Root) -> list[str]:
    return [record["sha256"] for record in root.committed().values()]


def copied(root: Root, folder: Path) -> Root:
    shutil.copytree(root.url, folder / "again")
    return Root(str(folder / "again"))


def stability(models, plan, group, noise) -> torch.Tensor:
    """At alpha 0, 1/2 and 1, each alone."""
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
    models = load_models(built, plan, device="cpu")
    chosen = Counter()
    for sample in samples(built):
        note, group = sample.record["noise"], plan.group(sample.record["group"])
        seeds = [group.seed, *(hashed_seed(0, "group", group.index, c) for c in (1, 2))]
        best = int(np.argmax(note["scores"]))
        chosen[best] += 1
        noise = initial_noise([note["seed"]], models.generator.latent_shape)[0]
        assert note == note | {
            "strategy": "select",
            "bank": "group",
            "candidates": 3,
            "steps": 2,
            "guidance_scale": 1.0,
            "stability": max(note["scores"]),
            "seed": seeds[best],
            "digest": noise_digest(noise),
        }
        each = stability(models, plan, group, noise)
        torch.testing.assert_close(torch.tensor(note["per_alpha"]), each, atol=1e-4, rtol=0)
        assert note["stability"] == pytest.approx(np.mean(note["per_alpha"]), abs=1e-6)
        assert sample.record["seed"] == group.seed
    assert len(chosen) == 3  # else the choice would be trivial
    assert built.store.list("noise") == []


def test_the_images_come_from_the_recorded_seed(built):
    plan = plan_of(built)
    models = load_models(built, plan, device="cpu")
    sample = samples(built)[5]
    group = plan.group(sample.record["group"])
    images = mix_groups(
        [group],
        initial_noise([sample.record["noise"]["seed"]], models.generator.latent_shape),
        embeddings=models.embeddings,
        generator=models.generator,
        batch_groups=3,
    )[0]
    stored = np.stack([decode_image(image) for image in sample.images])
    assert np.abs(images.cpu().numpy().astype(int) - stored).max() <= 1


def test_the_worker_makes_a_lost_shard_again_to_the_same_bytes(built, tmp_path):
    again = copied(built, tmp_path)
    again.discard(2)
    assert worker([again.url, "--device", "cpu"]) == 0
    assert hashes(again) == hashes(built)


@pytest.mark.parametrize("bank", ["run", "group"])
def test_leases_are_renewed_while_noise_is_chosen(
    make_config, hasty_standins, tmp_path, monkeypatch, bank
):
    monkeypatch.setattr("data.leases.RENEW_EVERY_S", 0.0)
    one = ("mixing.pairs.count=1", "shards.groups_per_shard=2", "noise.candidates=16")
    root = create_root(
        make_config(hasty_standins, *SETTINGS, *one, f"noise.bank={bank}"), str(tmp_path)
    )
    ensure_prototypes(root, device="cpu")
    forgotten, held = [], []

    def beat() -> None:
        """All leases are old after each beat, unless they are renewed at the next."""
        names, now = root.store.list("leases"), root.store.now()
        held.append({name.split("/")[1] for name in names})
        forgotten.append(held[-1] - {Path(name).name for name in living(root.store)})
        for name in names:
            os.utime(f"{root.url}/{name}", (now - 2 * TIME_TO_LIVE,) * 2)

    assert Worker(Building(root), 0, 1, device="cpu", beat=beat).run() == 0
    choice = {"0000000.json"} | ({"noise-run.json"} if bank == "run" else set())
    assert held.count(choice) >= 2
    assert not any(forgotten)


def test_one_candidate_is_the_random_noise(build):
    few = ("mixing.pairs.count=1",)
    alone, plain = build("noise.candidates=1", *few), build("noise.strategy=random", *few)
    for one, other in zip(samples(alone), samples(plain), strict=True):
        assert one.record["noise"]["seed"] == one.record["seed"]
        assert one.images == other.images
        assert other.record["noise"] == {"strategy": "random", "stability": None}


def test_the_series_of_a_pair_take_its_noises_in_the_order_of_their_stability(build):
    root = build("noise.bank=pair")
    assert len(root.store.list("noise")) == 6
    plan = plan_of(root)
    for sample in samples(root):
        note, group = sample.record["noise"], plan.group(sample.record["group"])
        rank = group.index % 6
        part, digest = unpacked(root.store.get(f"noise/0000/{rank:07d}.safetensors"))
        assert digest == plan.digest
        assert part.facts["seeds"][0] == plan.group(rank).seed
        assert note == part.record(group.round)
        assert note["stability"] == sorted(note["scores"])[-1 - group.round]


def test_a_run_hands_out_its_best_noises_in_turn(build):
    root = build("noise.bank=run", "noise.candidates=6", "noise.keep=4")
    part, _ = unpacked(root.store.get("noise/run.safetensors"))
    assert len(part) == 4
    plan = plan_of(root)
    models = load_models(root, plan, device="cpu")
    for sample in samples(root):
        group = plan.group(sample.record["group"])
        assert sample.record["noise"] == part.record((group.round + group.index % 6) % 4)
    stabilities = [part.record(entry)["stability"] for entry in range(4)]
    assert stabilities == sorted(part.facts["common"]["scores"], reverse=True)[:4]
    # Scored under all six pairs, since there are no more than eight.
    noise = part.noise(0, models.generator.latent_shape)
    each = torch.stack([stability(models, plan, plan.group(rank), noise) for rank in range(6)])
    expected = torch.tensor(part.record(0)["per_alpha"])
    torch.testing.assert_close(each.mean(0), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bank", ["group", "pair"])
def test_optimised_noise_is_kept_and_used_as_it_is_stored(build, bank):
    root = build(
        "noise.strategy=optimise",
        "noise.iterations=1",
        "noise.candidates=2",
        "mixing.pairs.count=1",
        f"noise.bank={bank}",
    )
    plan = plan_of(root)
    models = load_models(root, plan, device="cpu")
    assert len(root.store.list("noise")) == {"group": 2, "pair": 1}[bank]
    for sample in samples(root):
        note, group = sample.record["noise"], plan.group(sample.record["group"])
        number, entry = (group.index, 0) if bank == "group" else (0, group.round)
        part, _ = unpacked(root.store.get(f"noise/0000/{number:07d}.safetensors"))
        assert note == part.record(entry)
        assert note["stability"] == sorted(e["stability"] for e in part.facts["entries"])[~entry]
        assert (note["strategy"], note["seed"], note["iterations"]) == ("optimise", None, 1)
        assert note["stability"] >= note["start_stability"]
        noise = part.noise(entry, models.generator.latent_shape)
        assert noise_digest(noise) == note["digest"]
        each = stability(models, plan, group, noise)
        torch.testing.assert_close(each, torch.tensor(note["per_alpha"]), atol=1e-3, rtol=0)
    used, _ = models.noise([group])
    assert torch.equal(used[0], noise)


@pytest.mark.parametrize(
    ("lost", "overrides"),
    [
        (False, ("noise.bank=pair",)),
        (True, ("noise.bank=pair",)),
        (True, ("noise.bank=run", "noise.candidates=6", "noise.keep=4")),
    ],
)
def test_a_killed_build_goes_on_to_the_same_bytes(build, tmp_path, lost, overrides):
    """Whether the bank was stored before the kill or is chosen anew."""
    whole = build(*overrides)
    again = copied(whole, tmp_path)
    again.discard(1)
    if lost:
        again.store.delete(whole.store.list("noise")[-1])
    assert worker([again.url, "--device", "cpu"]) == 0
    assert hashes(again) == hashes(whole)
    for name in whole.store.list("noise"):
        assert again.store.get(name) == whole.store.get(name)


def test_a_scheduler_that_cannot_be_inverted_is_refused_while_loading(built):
    plan = plan_of(built)
    models = load_models(built, plan, device="cpu")
    models.generator.denoiser.pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(InputError, match=r"noise\.strategy = .*FlowMatchEulerDiscreteScheduler"):
        noise_source(
            plan, generator=models.generator, embeddings=models.embeddings, store=built.store
        )


def test_beats_come_while_noise_is_chosen(built):
    plan, beats = plan_of(built), []
    models = load_models(built, plan, device="cpu", beat=lambda: beats.append(1))
    models.noise([plan.group(0)])
    assert len(beats) == 3  # batches: 3 groups x 3 candidates x 3 alphas in at most 12 rows


def test_a_builds_float32_is_never_tf32(make_config, hasty_standins, tmp_path, precisions):
    shrunk = ("mixing.pairs.count=1", "mixing.groups_per_pair=1")
    optimised = ("noise.strategy=optimise", "noise.candidates=1", "noise.iterations=1")
    config = make_config(hasty_standins, *SETTINGS, *shrunk, *optimised)
    root = create_root(config, str(tmp_path / "mixed"))
    ensure_prototypes(root, device="cpu")
    assert worker([root.url, "--device", "cpu"]) == 0
    assert precisions == {"ieee"}
