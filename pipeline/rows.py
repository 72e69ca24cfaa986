"""Network rows that one series costs, in full and in the shallow part."""

from dataclasses import dataclass

from pipeline.config import GeneratorConfig


@dataclass(frozen=True)
class Step:
    """One network call of the sampler.

    Attributes:
        guided: two rows an image, with and without the condition; else one, with it.
        fresh: deep features are computed; else those of an earlier step serve again.
    """

    guided: bool
    fresh: bool


@dataclass(frozen=True)
class Rows:
    """Rows of the denoiser for one series.

    Attributes:
        full: through all of the network.
        shallow: through its outermost part alone, which only feature caches know.
    """

    full: int
    shallow: int


def count_rows(config: GeneratorConfig, images: int, *, calls: int | None = None) -> Rows:
    """What sampling a series of so many images costs.

    Args:
        calls: network calls of the sampler, where its kind is the model's own; by default those
            of the configured one.
    """
    anchors = config.approximate.cache_anchors or images
    full = shallow = 0
    calls = sampler_calls(config) if calls is None else calls
    for step in step_plan(config, calls):
        computed = anchors if step.fresh else 0
        full += computed * (1 + step.guided)
        shallow += (images - computed) * (1 + step.guided)
    return Rows(full, shallow)


def sampler_calls(config: GeneratorConfig) -> int:
    """Network calls of the configured sampler; one a step for a model's own."""
    steps = config.approximate.steps or config.steps
    kind = config.approximate.scheduler or config.scheduler
    if kind == "heun":  # looks at both ends of each step but the last
        return 2 * steps - 1
    # PNDM starts by taking one step twice, in the form without Runge-Kutta steps.
    return steps + (kind == "pndm" and steps > 1)


def step_plan(config: GeneratorConfig, calls: int) -> list[Step]:
    """What each network call computes; call i of n lies at the share i / n of the steps."""
    approximate = config.approximate
    start, stop = approximate.guidance_interval or (0.0, 1.0)
    steps: list[Step] = []
    age, held = approximate.cache_steps, False  # of the cached features
    for call in range(calls):
        guided = config.guidance_scale > 1 and start <= call / calls < stop
        # Rows without the condition have no features yet where guidance sets in.
        fresh = age == approximate.cache_steps or (guided and not held)
        age, held = (1, guided) if fresh else (age + 1, held)
        steps.append(Step(guided, fresh))
    return steps


def anchor_ranks(images: int, anchors: int) -> list[int]:
    """Which images of a series, by alpha, have features of their own: both ends, then evenly."""
    gaps = anchors - 1
    return [(2 * anchor * (images - 1) + gaps) // (2 * gaps) for anchor in range(anchors)]
