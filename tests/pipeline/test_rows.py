"""Which network calls are full, shallow, guided: counted by hand."""

import pytest

from pipeline.config import GeneratorConfig
from pipeline.rows import Rows, Step, anchor_ranks, count_rows, sampler_calls, step_plan


def config(guidance: float = 7.5, **approximate) -> GeneratorConfig:
    return GeneratorConfig(model="m", guidance_scale=guidance, approximate=approximate)


def plan_of(settings: GeneratorConfig, calls: int) -> str:
    """One letter a call: F full, s shallow; with a + where it is guided."""
    steps = step_plan(settings, calls)
    return " ".join(("F" if s.fresh else "s") + ("+" if s.guided else "") for s in steps)


def test_without_approximation_every_call_is_full():
    assert step_plan(config(), 3) == [Step(guided=True, fresh=True)] * 3
    assert step_plan(config(guidance=1.0), 2) == [Step(guided=False, fresh=True)] * 2
    assert count_rows(config(), 8) == Rows(full=2 * 20 * 8, shallow=0)


def test_the_whole_interval_changes_nothing():
    assert step_plan(config(guidance_interval=(0, 1)), 7) == step_plan(config(), 7)


@pytest.mark.parametrize(
    ("approximate", "expected"),
    [
        ({"guidance_interval": (0, 0.5)}, "F+ F+ F F"),
        ({"guidance_interval": (0.5, 1)}, "F F F+ F+"),
        ({"guidance_interval": (0.3, 0.74)}, "F F F+ F"),  # shares 0, 1/4, 1/2, 3/4
        ({"cache_steps": 2}, "F+ s+ F+ s+"),
        ({"cache_steps": 3}, "F+ s+ s+ F+"),
        ({"cache_steps": 3, "guidance_interval": (0, 0.5)}, "F+ s+ s F"),
        # Rows without the condition have nothing cached yet when guidance sets in.
        ({"cache_steps": 3, "guidance_interval": (0.5, 1)}, "F s F+ s+"),
    ],
)
def test_the_calls_of_four(approximate, expected):
    assert plan_of(config(**approximate), 4) == expected


def test_rows_of_a_series():
    # 6 of 10 steps guided: 6 x 2 + 4 rows an image.
    interval = GeneratorConfig(model="m", steps=10, approximate={"guidance_interval": (0, 0.6)})
    assert count_rows(interval, 8) == Rows(full=16 * 8, shallow=0)
    # 7 of 20 calls full, two rows each.
    assert count_rows(config(cache_steps=3), 8) == Rows(full=2 * 7 * 8, shallow=2 * 13 * 8)
    assert count_rows(config(cache_anchors=3), 8) == Rows(full=2 * 20 * 3, shallow=2 * 20 * 5)
    both = config(cache_anchors=3, cache_steps=2)
    assert count_rows(both, 8) == Rows(full=2 * 10 * 3, shallow=2 * (10 * 5 + 10 * 8))


def test_sampler_calls():
    assert sampler_calls(config()) == 20
    assert sampler_calls(config(steps=7)) == 7
    assert sampler_calls(config(scheduler="heun", steps=5)) == 9
    assert sampler_calls(config(scheduler="pndm", steps=5)) == 6
    assert count_rows(config(), 4, calls=3) == Rows(full=24, shallow=0)


@pytest.mark.parametrize(
    ("images", "anchors", "expected"),
    [(8, 2, [0, 7]), (8, 3, [0, 4, 7]), (8, 4, [0, 2, 5, 7]), (5, 3, [0, 2, 4]), (3, 2, [0, 2])],
)
def test_anchors_lie_evenly_and_at_both_ends(images, anchors, expected):
    assert anchor_ranks(images, anchors) == expected


def test_anchors_never_coincide():
    for images in range(3, 40):
        for anchors in range(2, images):
            ranks = anchor_ranks(images, anchors)
            assert sorted(set(ranks)) == ranks
            assert (ranks[0], ranks[-1]) == (0, images - 1)
