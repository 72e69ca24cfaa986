"""The gate before a build, on small genuine models after a few steps of training."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.errors import InputError
from data.fingerprint import hashed_seed
from data.root import FIDELITY, Root
from pipeline.fidelity import ensure_fidelity
from pipeline.fidelity.gate import gate_groups, load_recipes, psnr, reseeded
from pipeline.noise import initial_noise
from pipeline.plan import BuildPlan
from pipeline.prototypes import PROTOTYPES, ensure_prototypes
from pipeline.root import create_root, plan_of

pytestmark = pytest.mark.process  # for its length


@pytest.fixture
def make_root(make_config, hasty_standins, tmp_path):
    """make_root(*overrides): a root with prototypes, nothing generated yet."""

    def make(*overrides: str) -> Root:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        fixed = ("generator.steps=6", "mixing.pairs={kind: sampled, count: 22}")
        root = create_root(make_config(hasty_standins, *fixed, *overrides), str(place))
        ensure_prototypes(root, device="cpu")
        return root

    return make


def test_an_exact_build_has_no_gate(make_root):
    root = make_root()
    assert ensure_fidelity(root, device="cpu") is None
    assert not root.store.exists(FIDELITY)


def test_an_approximation_that_changes_nothing_passes(make_root):
    root = make_root("generator.approximate.guidance_interval=[0,1]")
    verdict = ensure_fidelity(root, device="cpu")
    assert verdict == json.loads(root.store.get(FIDELITY))
    assert verdict["passed"]
    assert (verdict["groups"], verdict["images"]) == (22, 88)
    assert verdict["recipe"] == {"guidance_interval": [0.0, 1.0]}
    assert verdict["downstream"] == "not measured"
    found = {criterion["name"]: criterion for criterion in verdict["criteria"]}
    assert set(found) == {
        "series that only rise",
        "entropy of weights",
        "weights in 0.2 to 0.8",
        "CLIP Frechet distance",
    }
    for criterion in found.values():
        assert criterion["distance"] == pytest.approx(0, abs=1e-9)
    # Other seeds are other images, or the limits would mean nothing.
    assert found["CLIP Frechet distance"]["other"] > 1e-6
    diagnostics = verdict["diagnostics"]
    assert diagnostics["psnr_db_median"] is None
    assert diagnostics["weight_change_95"] == 0


def test_a_gross_approximation_is_refused_with_its_figures(make_root):
    root = make_root("generator.approximate.steps=1")
    message = (
        r"generator\.approximate = steps 1: the images fail the fidelity gate on 22 series: "
        r".* is off by [\d.e+-]+, allowed [\d.e+-]+ \(.*fast .*other seeds .*\); switch it off, or "
        r"set generator\.approximate\.accept_failure: true, in a new place"
    )
    with pytest.raises(InputError, match=message):
        ensure_fidelity(root, device="cpu")
    verdict = json.loads(root.store.get(FIDELITY))
    assert not verdict["passed"]
    assert verdict["speedup"] > 1
    assert 0 < verdict["diagnostics"]["psnr_db_median"] < 40
    assert verdict["diagnostics"]["weight_change_95"] > 0
    # Measured once, a refusal too: a second look needs nothing but the verdict.
    root.store.delete(PROTOTYPES)
    root.store.put(FIDELITY, json.dumps(verdict | {"groups": 7}).encode())
    with pytest.raises(InputError, match="on 7 series"):
        ensure_fidelity(root, device="cpu")


def test_a_failure_can_be_accepted_and_stays_in_the_root(make_root):
    options = ("generator.approximate.steps=1", "generator.approximate.accept_failure=true")
    root = make_root(*options, "generator.approximate.gate_groups=20")
    verdict = ensure_fidelity(root, device="cpu")
    assert not verdict["passed"]
    assert verdict["groups"] == 20
    assert json.loads(root.store.get(FIDELITY)) == verdict


def test_series_of_three_classes_have_no_order_to_rise_in(make_root):
    kind = ("mixing.classes=3", "mixing.grid=random", "annotation.rule=simplex")
    root = make_root(*kind, "generator.approximate.guidance_interval=[0,1]")
    verdict = ensure_fidelity(root, device="cpu")
    assert [criterion["name"] for criterion in verdict["criteria"]] == [
        "entropy of weights",
        "weights in 0.2 to 0.8",
        "CLIP Frechet distance",
    ]
    assert verdict["passed"]


def test_both_recipes_start_from_the_groups_own_noise(make_root):
    """Whatever the build chooses: the gate judges the sampler, not the noise."""
    root = make_root(
        "generator.approximate.guidance_interval=[0,0.5]",
        "noise.strategy=select",
        "noise.max_cost=10",
    )
    plan = plan_of(root)
    recipes = load_recipes(root, plan, device="cpu")
    groups = gate_groups(plan)[:2]
    shape = recipes.exact.generator.latent_shape
    for models in (recipes.exact, recipes.fast):
        expected = initial_noise([group.seed for group in groups], shape)
        torch.testing.assert_close(models.noise(groups)[0], expected, rtol=0, atol=0)
    assert not recipes.exact.generator.config.approximate.active
    assert recipes.fast.generator.config.approximate.active
    assert recipes.exact.generator.denoiser is recipes.fast.generator.denoiser


def test_the_gate_takes_series_from_all_over_the_plan(hasty_config):
    many = hasty_config.model_copy(
        update={"mixing": hasty_config.mixing.model_copy(update={"groups_per_pair": 100})}
    )
    plan = BuildPlan(many)
    groups = gate_groups(plan)
    indices = [group.index for group in groups]
    assert len(set(indices)) == 200
    assert max(indices) > 4000
    assert len({group.classes for group in groups}) > 40
    assert groups == gate_groups(plan)
    assert groups[0] == plan.group(indices[0])


def test_other_seeds_belong_to_the_same_series(hasty_config):
    plan = BuildPlan(hasty_config)
    groups = gate_groups(plan)
    others = reseeded(groups, plan)
    assert others[3].seed == hashed_seed(0, "gate", groups[3].index)
    assert [replace(o, seed=g.seed) for o, g in zip(others, groups, strict=True)] == groups
    assert not {group.seed for group in groups} & {group.seed for group in others}


def test_psnr_of_one_grey_level_is_48_decibels():
    first = np.full((1, 2, 4, 4, 3), 100, np.uint8)
    second = first.copy()
    second[:, 1] = 101
    assert psnr(first, second).tolist() == [float("inf"), pytest.approx(20 * np.log10(255))]
