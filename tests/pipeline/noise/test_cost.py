"""What selecting noise costs, against values worked out by hand."""

import math
import subprocess
import sys

import pytest

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.config import BuildConfig
from semix.pipeline.noise.cost import (
    Rung,
    check_noise_cost,
    noise_cost,
    rows_per_forward,
    rungs,
    selection_rows,
)
from semix.pipeline.plan import BuildPlan


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
        (("generator.steps=5",), 8 * 3 * 2 * 5 / (8 * 5 * 2)),
        (("noise.candidates=16", "noise.halving=true"), (7 / 30 + 1 / 4) * 3.0),
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
    cost = noise_cost(config, groups=180)
    assert cost.ratio == pytest.approx(ratio, rel=0.03)  # the padding of odd batches


def test_rows_of_full_batches_are_exact():
    cost = noise_cost(build_config(), groups=180)
    assert (cost.rows, cost.generation_rows) == (180 * 8 * 60, 180 * 320)


def test_without_padding_a_candidate_costs_two_passes_a_point():
    assert selection_rows(build_config()) == 8 * 8 * 3 * 2 * 10  # of the 8 groups of a batch
    assert selection_rows(build_config("noise.guidance_scale=5")) == 2 * 8 * 8 * 3 * 2 * 10
    assert selection_rows(build_config("generator.steps=4")) == 8 * 8 * 3 * 2 * 4
    assert selection_rows(build_config("noise.strategy=optimise")) == 8 * 3 * 2 * 10


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (64, 64), (65, 33), (192, 64), (129, 43)])
def test_batches_over_some_rows_have_one_size_and_little_padding(rows, size):
    assert rows_per_forward(rows, max_rows=64) == size
    assert math.ceil(rows / size) * size - rows < math.ceil(rows / 64)


def test_the_first_look_is_short_and_in_the_middle():
    assert rungs(build_config("noise.halving=true")) == [Rung(8, 7, point=1), Rung(2, 10)]
    three = ("mixing.classes=3", "mixing.grid=random", "annotation.rule=simplex")
    assert rungs(build_config("noise.halving=true", *three))[0] == Rung(8, 7, point=3)
    off_centre = build_config("noise.halving=true", "noise.alphas=[0.1,1.0,0.7]")
    assert rungs(off_centre)[0].point == 2
    assert rungs(build_config()) == [Rung(8, 10)]
    # one candidate is not halved, nor what would cost as much
    assert rungs(build_config("noise.halving=true", "noise.candidates=1")) == [Rung(1, 10)]
    dear = ("noise.alphas=[0.5]", "noise.candidates=2", "noise.halving=true")
    assert rungs(build_config(*dear)) == [Rung(2, 10)]


def test_what_is_too_dear_is_refused_with_its_price_and_what_to_do():
    plan = BuildPlan(build_config("noise.candidates=96"))
    with pytest.raises(InputError) as caught:
        check_noise_cost(plan)
    assert str(caught.value) == (
        "noise.candidates = 96: selecting noise would cost 18 times what generating costs "
        "(1,036,800 network rows against 57,600), above noise.max_cost = 2; take fewer "
        "candidates, noise.halving: true, or raise noise.max_cost"
    )


def test_optimising_every_series_is_refused_too():
    plan = BuildPlan(build_config("noise.strategy=optimise"))
    message = r"noise\.iterations = 100: .* would cost 57\.9 times .* take fewer iterations"
    with pytest.raises(InputError, match=message):
        check_noise_cost(plan)


def test_what_is_allowed_passes():
    check_noise_cost(BuildPlan(build_config()))
    check_noise_cost(BuildPlan(build_config("noise.candidates=96", "noise.max_cost=18")))
    check_noise_cost(BuildPlan(build_config("noise.strategy=random", "noise.max_cost=0.001")))


@pytest.mark.process
def test_the_cost_is_known_without_torch():
    script = (
        "import sys, semix.pipeline.noise.cost; print([m for m in ('torch',) if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
