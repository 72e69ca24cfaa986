"""Gradient descent on the noise of a tiny genuine model."""

import pytest
import torch

from semix.pipeline.config import GeneratorConfig, NoiseConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import ddim_pair
from semix.pipeline.noise import initial_noise, inversion_stability, optimise_noise
from semix.pipeline.noise.search import Scorer

pytestmark = pytest.mark.process  # for its length

STEPS = 3


@pytest.fixture(scope="module")
def generator(request):
    model = str(request.getfixturevalue("tiny_sd_epsilon"))
    return load_generator(GeneratorConfig(model=model, guidance_scale=2.0), device="cpu")


@pytest.fixture(scope="module")
def conditions(generator, tiny_names):
    return generator.encode(tiny_names[:3])


@pytest.fixture
def start(generator):
    return initial_noise([1, 2], generator.latent_shape)


def optimise(
    generator,
    conditions,
    start,
    *,
    predict=None,
    guidance_scale=1.0,
    max_rows=32,
    **settings,
):
    pair = ddim_pair(generator.denoiser.pipeline.scheduler)
    return optimise_noise(
        start,
        conditions,
        scorer=Scorer(predict or generator.predict, pair, guidance_scale, max_rows),
        steps=STEPS,
        settings=NoiseConfig(strategy="optimise", **{"iterations": 6, **settings}),
    )


def score(generator, conditions, noise, guidance_scale=1.0):
    with torch.inference_mode():
        per_point = [
            inversion_stability(
                noise,
                conditions[[point]].expand(len(noise)),
                predict=generator.predict,
                schedulers=ddim_pair(generator.denoiser.pipeline.scheduler),
                steps=STEPS,
                guidance_scale=guidance_scale,
            )
            for point in range(3)
        ]
    return torch.stack(per_point, dim=1)


@pytest.mark.parametrize(("reduce", "guidance_scale"), [("mean", 1.0), ("min", 2.0)])
def test_it_climbs_and_stays_on_its_sphere(generator, conditions, start, guidance_scale, reduce):
    result = optimise(generator, conditions, start, guidance_scale=guidance_scale, reduce=reduce)
    before = score(generator, conditions, start, guidance_scale)
    after = score(generator, conditions, result.noise, guidance_scale)
    reduced = (lambda s: s.mean(1)) if reduce == "mean" else (lambda s: s.amin(1))
    assert (reduced(after) > reduced(before) + 1e-4).all()
    torch.testing.assert_close(result.per_point, after, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.scores, reduced(after), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.history[0], reduced(before), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.scores, result.history.amax(0))
    norms = (noise.flatten(1).norm(dim=1) for noise in (start, result.noise))
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    assert result.history.shape == (7, 2)


def test_a_step_is_momentum_descent_scaled_by_the_norm(generator, conditions, start):
    """Two steps equal those of torch's SGD."""
    noise = start[:1].clone()
    norm = noise.norm()
    leaf = torch.nn.Parameter(noise)
    optimiser = torch.optim.SGD([leaf], lr=float(1000 * norm / 256), momentum=0.5)
    for _ in range(2):
        stability = inversion_stability(
            leaf.expand(3, -1, -1, -1),
            conditions.map(torch.clone),
            predict=generator.predict,
            schedulers=ddim_pair(generator.denoiser.pipeline.scheduler),
            steps=STEPS,
        )
        optimiser.zero_grad()
        (1 - stability.mean()).backward()
        optimiser.step()
        with torch.no_grad():
            leaf.mul_(norm / leaf.norm())
    expected = score(generator, conditions, leaf.detach()).mean(1)
    result = optimise(generator, conditions, start, iterations=2, learning_rate=1000)
    torch.testing.assert_close(result.history[2, :1], expected, atol=1e-4, rtol=0)
    assert abs(float(expected - result.history[0, 0])) > 1e-3


def test_noises_descend_alone_or_together_alike(generator, conditions, start):
    together = optimise(generator, conditions, start)
    alone = optimise(generator, conditions, start[1:])
    torch.testing.assert_close(together.history[:, 1:], alone.history, atol=1e-3, rtol=0)


def test_a_constant_target_is_cheaper_and_still_climbs(generator, conditions, start):
    calls = []

    def predict(*inputs):
        calls.append(torch.is_grad_enabled())
        return generator.predict(*inputs)

    result = optimise(generator, conditions, start, predict=predict, detach_target=True)
    assert not any(calls)
    assert (result.scores >= result.history[0]).all()
    assert not torch.equal(result.history[1], result.history[0])


def test_steps_that_are_too_long_lose_nothing(generator, conditions, start):
    result = optimise(generator, conditions, start, learning_rate=1e5)
    assert result.history[-1, 0] < result.scores[0] - 0.003
    torch.testing.assert_close(result.scores, result.history.amax(0))
    after = score(generator, conditions, result.noise).mean(1)
    torch.testing.assert_close(after, result.scores, atol=1e-4, rtol=0)


def failing_after(generator, calls):
    """The generator's prediction, but NaN after so many calls."""
    working_calls = iter(range(calls))

    def predict(*inputs):
        broken = next(working_calls, None) is None
        output = generator.predict(*inputs)
        return output * torch.nan if broken else output

    return predict


def test_the_best_so_far_survives_a_nan(generator, conditions, start):
    unbroken = optimise(generator, conditions, start[:1], iterations=10)
    # one batch: an evaluation is 6 calls forwards and 6 backwards, so the third one fails
    predict = failing_after(generator, 2 * 12)
    result = optimise(generator, conditions, start[:1], predict=predict, iterations=10)
    assert result.history.shape == (3, 1)
    assert result.history[2].isnan().all()
    torch.testing.assert_close(result.history[:2], unbroken.history[:2])
    torch.testing.assert_close(result.scores, unbroken.history[:2].amax(0))
    after = score(generator, conditions, result.noise).mean(1)
    torch.testing.assert_close(after, result.scores, atol=1e-4, rtol=0)


def test_one_noise_stops_and_the_other_goes_on(generator, conditions, start):
    start[1, 0, 0, 0] = 8.0  # by which `predict` knows it
    calls = 0

    def predict(latents, *inputs):
        nonlocal calls
        calls += 1
        output = generator.predict(latents, *inputs)
        # both share one batch: an evaluation is 6 calls forwards and 6 backwards
        spoilt = (latents[:, 0, 0, 0] > 5) & (calls > 12)
        return torch.where(spoilt[:, None, None, None], torch.nan, output)

    result = optimise(generator, conditions, start, predict=predict, max_rows=64, iterations=4)
    assert len(result.history) == 5
    assert result.history[1:, 1].isnan().all()
    assert result.history[:, 0].isfinite().all()
    assert result.scores[0] > result.history[0, 0]
    assert torch.equal(result.noise[1], start[1])


def test_a_start_without_a_score_stays_as_it_is(generator, conditions, start):
    result = optimise(generator, conditions, start, predict=failing_after(generator, 0))
    assert result.scores.tolist() == [-torch.inf] * 2
    assert len(result.history) == 1 and result.history.isnan().all()
    assert torch.equal(result.noise, start)
