"""What choosing noise costs, against figures worked out by hand."""

import subprocess
import sys

import pytest

from data.errors import InputError
from data.settings import load_settings
from pipeline.config import BuildConfig
from pipeline.noise.cost import noise_cost, refuse_cost, selection_cost
from pipeline.plan import BuildPlan


def build_config(*overrides: str) -> BuildConfig:
    """One series costs 8 x 20 x 2 = 320 rows, one candidate 3 x 2 x 10 = 60."""
    values = {
        "real": {"name": "digits"},
        "generator": {"model": "/none", "steps": 20, "guidance_scale": 7.5},
        "mixing": {"groups_per_pair": 4, "alphas": 8},
        "noise": {"strategy": "select"},
        "annotation": {"model": "local-dir:/none"},
    }
    return load_settings(BuildConfig, values, overrides)


@pytest.mark.parametrize(
    ("overrides", "ratio"),
    [
        (("noise.strategy=random",), 0),
        (("noise.candidates=4",), 0.75),
        ((), 1.5),  # eight candidates
        (("noise.candidates=16",), 3.0),
        (("noise.candidates=100",), 18.75),
        (("noise.guidance_scale=5",), 3.0),
        (("generator.guidance_scale=0", "generator.steps=4"), 8 * 3 * 2 * 4 / (8 * 4)),
        (("generator.approximate.steps=5",), 8 * 3 * 2 * 5 / (8 * 5 * 2)),
        (("noise.candidates=16", "noise.halving=true"), (7 / 30 + 1 / 4) * 3.0),
        (("noise.bank=pair",), 1.5 / 4),
        (("noise.bank=run", "noise.candidates=64"), 8 * 64 * 60 / (180 * 320)),
        (
            ("noise.strategy=optimise", "noise.candidates=1"),
            (3 * 100 + 1) * 60 / 320,
        ),
        (
            ("noise.strategy=optimise", "noise.candidates=1", "noise.detach_target=true"),
            (100 + 1) * 60 / 320,
        ),
        (("noise.strategy=optimise",), 1.5 + 301 * 60 / 320),
    ],
)
def test_the_ratio_to_the_cost_of_generating(overrides, ratio):
    config = build_config(*overrides)
    found = noise_cost(config, groups=180, pairs=45)
    assert found.ratio == pytest.approx(ratio, rel=0.03)  # the padding of odd batches


def test_rows_of_full_batches_are_exact():
    plan = BuildPlan(build_config())
    found = selection_cost(plan)
    assert (found.rows, found.production_rows) == (180 * 8 * 60, 180 * 320)


def test_what_is_too_dear_is_refused_with_its_price_and_cheaper_ways():
    plan = BuildPlan(build_config("noise.candidates=96"))
    with pytest.raises(InputError) as refused:
        refuse_cost(plan)
    assert str(refused.value) == (
        "noise.candidates = 96: choosing noise would cost 18 times what generating costs "
        "(1,036,800 network rows against 57,600), above noise.max_cost = 2; cheaper are "
        "noise.halving: true (8.7), noise.candidates: 10 (1.9), noise.bank: pair (4.5), "
        "noise.bank: run (0.8); or raise noise.max_cost"
    )


def test_optimising_every_series_is_refused_too():
    plan = BuildPlan(build_config("noise.strategy=optimise"))
    message = (
        r"noise\.iterations = 100: choosing noise would cost 57\.9 times .* noise\.strategy: select"
    )
    with pytest.raises(InputError, match=message):
        refuse_cost(plan)


def test_what_is_allowed_passes():
    refuse_cost(BuildPlan(build_config()))
    refuse_cost(BuildPlan(build_config("noise.candidates=96", "noise.max_cost=18")))
    refuse_cost(BuildPlan(build_config("noise.strategy=random", "noise.max_cost=0.001")))


@pytest.mark.process
def test_the_cost_is_known_without_torch():
    script = "import sys, pipeline.noise.cost; print([m for m in ('torch',) if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
