"""Scores by hand and on every family; the best of several: rows counted, ties and NaN by hand."""

import pytest
import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler
from torch import Tensor

from semix.data.settings import load_settings
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import ddim_pair
from semix.pipeline.noise import initial_noise, inversion_stability, select_noise
from semix.pipeline.noise.cost import (
    Rung,
    generation_batch,
    rungs,
    selection_rows,
    selections_at_once,
)
from semix.pipeline.noise.search import Scorer
from semix.pipeline.noise.source import scoring_points

STEPS = 4
SHAPE = (4, 8, 8)
NOTHING = Conditioning(torch.zeros(3, 1, 1))


def schedulers(prediction: str = "epsilon", spacing: str = "trailing"):
    settings = {
        "prediction_type": prediction,
        "timestep_spacing": spacing,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "clip_sample": False,
    }
    return DDIMScheduler(**settings), DDIMInverseScheduler(**settings)


class Network:
    """A small nonlinear function of latents, time and condition, one row at a time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(4, 4, 3, 3, generator=generator) / 6

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning, w: float):
        shift = condition.tokens.mean((1, 2))[:, None, None, None] + timestep / 1000
        return (
            torch.tanh(torch.conv2d(latents, self.weight.to(latents), padding=1) + shift) + w * 0.1
        )


def test_a_seed_gives_the_same_noise_in_any_batch():
    together = initial_noise([5, 7, 9], (4, 8, 8))
    assert torch.equal(together[1], initial_noise([7], (4, 8, 8))[0])
    assert not torch.equal(together[0], together[1])


def test_noise_is_standard_normal_float32():
    noise = initial_noise(range(64), (4, 16, 16))
    assert noise.dtype == torch.float32
    torch.testing.assert_close(noise.std(), torch.tensor(1.0), atol=0.02, rtol=0)
    torch.testing.assert_close(noise.mean(), torch.tensor(0.0), atol=0.02, rtol=0)


@pytest.mark.parametrize("steps", [3, 4, 7, 10, 20])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_a_constant_prediction_gives_the_start_back(steps, spacing):
    noise, constant = initial_noise([1, 2, 3], SHAPE), initial_noise([4, 5, 6], SHAPE)
    scores = inversion_stability(
        noise,
        NOTHING,
        predict=lambda *_: constant,
        schedulers=schedulers(spacing=spacing),
        steps=steps,
    )
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.ones(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [4, 10, 20])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_so_does_a_constant_noise_told_as_a_velocity(steps, spacing):
    """v = (eps - sqrt(1 - abar) x) / sqrt(abar) at the level of the latents; a constant v itself
    is another eps at each level, so it is not expected to."""
    noise, constant = initial_noise([1, 2, 3], SHAPE), initial_noise([4, 5, 6], SHAPE)
    pair = schedulers("v_prediction", spacing)
    levels = [abar for _, abar, _ in sampling_levels(pair[0], steps)]
    levels += [abar for _, abar, _ in inversion_levels(pair[0], steps)]
    next_levels = iter(levels)

    def velocity(latents, *_):
        abar = next(next_levels)
        return (constant - (1 - abar) ** 0.5 * latents) / abar**0.5

    scores = inversion_stability(noise, NOTHING, predict=velocity, schedulers=pair, steps=steps)
    torch.testing.assert_close(scores, torch.ones(3), atol=1e-6, rtol=0)


def sampling_levels(scheduler, steps):
    """(time step, abar of the latents, abar after the step), noisiest first."""
    scheduler.set_timesteps(steps)
    jump = 1000 // steps
    abar = {t: float(value) for t, value in enumerate(scheduler.alphas_cumprod)}
    times = scheduler.timesteps.tolist()
    return [(t, abar[t], abar[t - jump] if t >= jump else 1.0) for t in times]


def inversion_levels(scheduler, steps):
    return [(t, after, before) for t, before, after in reversed(sampling_levels(scheduler, steps))]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_it_is_the_ddim_equations(prediction, spacing):
    noise, network = initial_noise([1, 2, 3], SHAPE), Network()
    condition = Conditioning(torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1))
    pair = schedulers(prediction, spacing)
    x = noise.double()
    for t, abar, next_abar in [*sampling_levels(pair[0], 5), *inversion_levels(pair[0], 5)]:
        output = network(x, torch.tensor(t), condition, 0.0)
        epsilon = output
        if prediction == "v_prediction":
            epsilon = abar**0.5 * output + (1 - abar) ** 0.5 * x
        clean = (x - (1 - abar) ** 0.5 * epsilon) / abar**0.5
        x = next_abar**0.5 * clean + (1 - next_abar) ** 0.5 * epsilon
    expected = torch.cosine_similarity(noise.double().flatten(1), x.flatten(1)).float()
    assert expected.max() < 0.999
    scores = inversion_stability(
        noise, condition, predict=network, schedulers=pair, steps=5, guidance_scale=0.0
    )
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_both_passes_are_guided_alike():
    scales = []

    def predict(latents, timestep, condition, guidance_scale):
        scales.append(guidance_scale)
        return latents

    inversion_stability(
        initial_noise([1, 2, 3], SHAPE),
        NOTHING,
        predict=predict,
        schedulers=schedulers(),
        steps=4,
        guidance_scale=5.5,
    )
    assert scales == [5.5] * 8


def test_its_gradient_is_the_slope():
    noise, network = initial_noise([1, 2, 3], SHAPE), Network()

    def score(values):
        return inversion_stability(
            values, NOTHING, predict=network, schedulers=schedulers(), steps=4
        )

    leaf = noise.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(leaf).sum(), leaf)
    direction = gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
    step = 0.05
    slope = (score(noise + step * direction) - score(noise - step * direction)) / (2 * step)
    torch.testing.assert_close(
        slope, (gradient * direction).flatten(1).sum(1), rtol=0.02, atol=1e-5
    )


def test_a_constant_target_lets_no_gradient_through_the_network():
    leaf = initial_noise([1, 2, 3], SHAPE).requires_grad_()

    def predict(latents, *_):
        assert not torch.is_grad_enabled()
        return torch.tanh(latents)

    score = inversion_stability(
        leaf, NOTHING, predict=predict, schedulers=schedulers(), steps=4, detach_target=True
    )
    (gradient,) = torch.autograd.grad(score.sum(), leaf)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("tiny_sd", "stable_diffusion"),
        ("tiny_sd_epsilon", "stable_diffusion"),
        ("tiny_sd_turbo", "stable_diffusion"),
        ("tiny_sdxl", "sdxl"),
        ("tiny_dit", "dit"),
    ],
)
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_every_family_inverts(model, family, guidance_scale, request, tiny_names):
    config = GeneratorConfig(
        family=family, model=str(request.getfixturevalue(model)), guidance_scale=2.0
    )
    generator = load_generator(config, device="cpu")
    embeddings = generator.encode(tiny_names[:3])
    noise = initial_noise([1, 2, 3], generator.latent_shape)
    pair = ddim_pair(generator.denoiser.pipeline.scheduler)
    shared = pair[0].config.keys() & pair[1].config.keys() - {"_class_name", "_use_default_values"}
    assert {key: pair[0].config[key] for key in shared} == {
        key: pair[1].config[key] for key in shared
    }

    def score(rows, steps):
        with torch.inference_mode():
            return inversion_stability(
                noise[rows],
                embeddings[rows],
                predict=generator.predict,
                schedulers=pair,
                steps=steps,
                guidance_scale=guidance_scale,
            )

    scores = score([0, 1, 2], 5)
    assert scores.abs().max() <= 1
    assert len(set(scores.tolist())) == 3
    torch.testing.assert_close(score([2], 5), scores[2:], atol=1e-4, rtol=0)
    assert not torch.equal(score([0, 1, 2], 6), scores)


def build_config(*overrides: str) -> BuildConfig:
    values = {
        "real": {"name": "digits"},
        "generator": {"model": "/none", "steps": 20, "guidance_scale": 7.5},
        "mixing": {"groups_per_pair": 1, "alphas": 4},
        "noise": {"strategy": "select"},
        "annotation": {"model": "local-dir:/none"},
        "shards": {"groups_per_batch": 2},
    }
    return load_settings(BuildConfig, values, overrides)


@pytest.fixture(scope="module")
def generator(request):
    model = str(request.getfixturevalue("tiny_sd_epsilon"))
    return load_generator(GeneratorConfig(model=model, guidance_scale=2.0), device="cpu")


@pytest.fixture(scope="module")
def embeddings(generator, tiny_names):
    with torch.inference_mode():
        return generator.encode(tiny_names[:6])


def scorer_of(generator, *, max_rows=8, guidance_scale=1.0, predict=None) -> Scorer:
    pair = ddim_pair(generator.denoiser.pipeline.scheduler)
    return Scorer(predict or generator.predict, pair, guidance_scale, max_rows)


def choose(generator, embeddings, *, seeds, schedule, **settings):
    """Select noise for each row of seeds, scored under the next three embeddings as its points."""
    scorer = scorer_of(generator, predict=settings.pop("predict", None))
    return select_noise(
        seeds,
        embeddings[: 3 * len(seeds)],
        scorer=scorer,
        shape=generator.latent_shape,
        rungs=schedule,
        **settings,
    )


@pytest.mark.parametrize("reduce", ["mean", "min"])
def test_the_best_is_the_argmax_of_scores_taken_one_by_one(generator, embeddings, reduce):
    seeds = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    choices = choose(generator, embeddings, seeds=seeds, schedule=[Rung(5, STEPS)], reduce=reduce)
    for row, choice in enumerate(choices):
        alone = torch.tensor(
            [
                [
                    inversion_stability(
                        initial_noise([seed], generator.latent_shape),
                        embeddings[[3 * row + point]],
                        predict=generator.predict,
                        schedulers=ddim_pair(generator.denoiser.pipeline.scheduler),
                        steps=STEPS,
                    )
                    for point in range(3)
                ]
                for seed in seeds[row]
            ]
        )
        expected = alone.mean(1) if reduce == "mean" else alone.amin(1)
        torch.testing.assert_close(torch.tensor(choice.per_point), alone, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(choice.scores), expected, atol=1e-4, rtol=0)
        assert choice.best == int(expected.argmax())
        assert choice.seeds == tuple(seeds[row])


def test_halving_scores_the_best_of_a_first_look_in_full(generator, embeddings):
    """The first look is short and at the middle point alone."""
    seeds = [list(range(8)), list(range(8, 16))]
    first = Rung(8, 2, point=1)
    halved = choose(generator, embeddings, seeds=seeds, schedule=[first, Rung(2, STEPS)])
    short = choose(generator, embeddings, seeds=seeds, schedule=[Rung(8, 2)])
    full = choose(generator, embeddings, seeds=seeds, schedule=[Rung(8, STEPS)])
    for half, first_look, exact in zip(halved, short, full, strict=True):
        middle = torch.tensor(first_look.per_point)[:, 1]
        scored = [c for c, score in enumerate(half.scores) if score is not None]
        assert scored == sorted(middle.topk(2).indices.tolist())
        assert [c for c, values in enumerate(half.per_point) if values is not None] == scored
        for candidate in scored:
            assert half.scores[candidate] == pytest.approx(exact.scores[candidate], abs=1e-5)
            assert len(half.per_point[candidate]) == 3
        assert half.best == max(scored, key=lambda c: exact.scores[c])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("noise.candidates=5", "noise.alphas=[0.0,1.0]"),
        ("noise.guidance_scale=2",),
        ("noise.halving=true",),
        ("noise.halving=true", "noise.candidates=11", "noise.guidance_scale=3"),
        ("noise.strategy=optimise", "noise.candidates=16", "noise.halving=true"),
        ("mixing.classes=3", "mixing.grid=random", "annotation.rule=simplex"),
    ],
)
def test_the_rows_are_those_that_were_counted_beforehand(
    generator, embeddings, overrides, tiny_names
):
    config = build_config("noise.steps=6", "noise.candidates=8", *overrides)
    noise, choices = config.noise, selections_at_once(config)
    assert choices == (2 if noise.strategy == "select" else 1)
    rows, sizes = [], set()

    def count(module, inputs, output):
        rows.append(len(inputs[0]))

    def predict(latents, *inputs):
        sizes.add(len(latents))
        return generator.predict(latents, *inputs)

    scorer = scorer_of(
        generator,
        max_rows=generation_batch(config),
        guidance_scale=noise.guidance_scale,
        predict=predict,
    )
    hook = generator.denoiser.network.register_forward_hook(count)
    with hook:
        select_noise(
            [range(100 * c, 100 * c + noise.candidates) for c in range(choices)],
            embeddings[[row % 6 for row in range(choices * len(scoring_points(config)))]],
            scorer=scorer,
            shape=generator.latent_shape,
            rungs=rungs(config),
        )
    assert sum(rows) == selection_rows(config)
    assert len(sizes) <= len(rungs(config))  # one size per rung: short batches are padded
    assert max(sizes) <= generation_batch(config)


def test_one_candidate_is_taken_as_it_is(generator, embeddings):
    (choice,) = choose(generator, embeddings, seeds=[[42]], schedule=[Rung(1, STEPS)])
    assert (choice.best, choice.seeds) == (0, (42,))


def test_of_equal_candidates_the_first_is_kept(generator, embeddings):
    (choice,) = choose(
        generator,
        embeddings,
        seeds=[[9, 4, 4, 9]],
        schedule=[Rung(4, STEPS)],
        predict=lambda latents, *_: torch.tanh(latents),
    )
    assert choice.scores[0] == choice.scores[3] != choice.scores[1] == choice.scores[2]
    assert choice.best == (0 if choice.scores[0] > choice.scores[1] else 1)


def broken_for(*seeds):
    """A network that gives NaN wherever it starts from these seeds' noise."""
    bad = initial_noise(seeds, (4, 8, 8))

    def predict(latents, *_):
        hit = (latents[:, None] == bad.to(latents)).flatten(2).all(2).any(1)
        return torch.where(hit[:, None, None, None], torch.nan, torch.tanh(latents))

    return predict


@pytest.mark.parametrize("schedule", [[Rung(4, STEPS)], [Rung(4, 1), Rung(2, STEPS)]])
def test_candidates_without_a_score_drop_out(generator, embeddings, schedule):
    (choice,) = choose(
        generator, embeddings, seeds=[[1, 2, 3, 4]], schedule=schedule, predict=broken_for(1, 3, 4)
    )
    assert [score is None for score in choice.scores] == [True, False, True, True]
    assert choice.best == 1


@pytest.mark.parametrize("schedule", [[Rung(2, STEPS)], [Rung(2, 1), Rung(1, STEPS)]])
def test_a_choice_without_any_score_has_its_first_candidate_and_no_other_suffers(
    generator, embeddings, schedule
):
    seeds = [[1, 2], [3, 4]]
    one, other = choose(
        generator, embeddings, seeds=seeds, schedule=schedule, predict=broken_for(3, 4)
    )
    assert (other.best, other.scores, other.per_point) == (0, (None, None), (None, None))
    assert one.scores[one.best] is not None


def test_a_series_is_scored_at_its_alphas_and_a_simplex_at_corners_and_centre():
    pairs = scoring_points(build_config("noise.alphas=[0.25,1.0]"))
    torch.testing.assert_close(pairs, torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    three = build_config("mixing.classes=3", "mixing.grid=random", "annotation.rule=simplex")
    expected = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(scoring_points(three), expected)


def test_conditions_given_to_a_scorer_belong_to_their_own_set(generator):
    """With a network that only repeats its condition, equal sets score alike, others do not."""

    def predict(latents, timestep, condition, guidance_scale):
        return latents * condition.tokens.view(-1, 1, 1, 1)

    scorer = scorer_of(generator, max_rows=5, predict=predict)
    noise = initial_noise([1, 2, 1, 2], generator.latent_shape).view(2, 2, 4, 8, 8)
    conditions = Conditioning(torch.tensor([0.1, 0.5, 0.5, 0.1]).view(4, 1, 1))
    scores = scorer(noise, conditions, steps=STEPS)
    assert scores.shape == (2, 2, 2)
    torch.testing.assert_close(scores[0], scores[1].flip(-1))
