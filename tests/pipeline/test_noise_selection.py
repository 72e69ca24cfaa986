"""The best of several candidates: rows are counted, ties and NaN worked out by hand."""

import math

import pytest
import torch

from data.settings import load_settings
from pipeline.conditioning import Conditioning
from pipeline.config import BuildConfig, GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.schedulers import ddim_pair
from pipeline.noise import initial_noise, inversion_stability, select_noise
from pipeline.noise.rungs import Rung, production_batch, rows_per_forward, rungs, selection_rows
from pipeline.noise.scoring import Scorer, scoring_points

STEPS = 4


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


def scorer_of(generator, *, most_rows=8, guidance_scale=1.0, predict=None) -> Scorer:
    pair = ddim_pair(generator.denoiser.pipeline.scheduler)
    return Scorer(predict or generator.predict, pair, guidance_scale, most_rows)


def choose(generator, embeddings, *, seeds, schedule, **settings):
    """Each choice under the next three embeddings, which are its three points."""
    scorer = scorer_of(generator, predict=settings.pop("predict", None))
    return select_noise(
        seeds,
        embeddings[: 3 * len(seeds)],
        scorer=scorer,
        shape=generator.latent_shape,
        rungs=schedule,
        names=[f"group {index + 7}" for index in range(len(seeds))],
        points=3,
        **settings,
    )


@pytest.mark.parametrize("reduce", ["mean", "min"])
def test_the_best_is_the_argmax_of_scores_taken_one_by_one(generator, embeddings, reduce):
    seeds = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    found = choose(
        generator, embeddings, seeds=seeds, schedule=[Rung(5, STEPS)], reduce=reduce, keep=2
    )
    for row, choice in enumerate(found):
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
        assert choice.best == tuple(expected.argsort(descending=True)[:2].tolist())
        assert choice.seeds == tuple(seeds[row])


def test_halving_scores_the_best_of_a_first_look_in_full(generator, embeddings):
    """The first look is short and at the middle point alone."""
    seeds = [list(range(8)), list(range(8, 16))]
    first = Rung(8, 2, point=1)
    looked = choose(generator, embeddings, seeds=seeds, schedule=[first], keep=2)
    halved = choose(generator, embeddings, seeds=seeds, schedule=[first, Rung(2, STEPS)])
    short = choose(generator, embeddings, seeds=seeds, schedule=[Rung(8, 2)])
    full = choose(generator, embeddings, seeds=seeds, schedule=[Rung(8, STEPS)])
    for look, half, whole, exact in zip(looked, halved, short, full, strict=True):
        middle = torch.tensor(whole.per_point)[:, 1]
        assert sorted(look.best) == sorted(middle.topk(2).indices.tolist())
        scored = [c for c, score in enumerate(half.scores) if score is not None]
        assert scored == sorted(look.best)
        assert [c for c, each in enumerate(half.per_point) if each is not None] == scored
        for candidate in scored:
            assert half.scores[candidate] == pytest.approx(exact.scores[candidate], abs=1e-5)
            assert len(half.per_point[candidate]) == 3
        assert half.best == (max(scored, key=lambda c: exact.scores[c]),)


def test_the_first_look_is_short_and_in_the_middle():
    assert rungs(build_config("noise.halving=true")) == [Rung(8, 7, point=1), Rung(2, 10)]
    kept = build_config("noise.halving=true", "noise.bank=pair", "mixing.groups_per_pair=4")
    assert rungs(kept) == [Rung(8, 7, point=1), Rung(4, 10)]
    three = ("mixing.classes=3", "mixing.grid=random", "annotation.rule=simplex")
    assert rungs(build_config("noise.halving=true", *three))[0] == Rung(8, 7, point=3)
    off_centre = build_config("noise.halving=true", "noise.alphas=[0.1,1.0,0.7]")
    assert rungs(off_centre)[0].point == 2
    assert rungs(build_config()) == [Rung(8, 10)]
    # one candidate is not halved, nor what would cost as much
    assert rungs(build_config("noise.halving=true", "noise.candidates=1")) == [Rung(1, 10)]
    dear = ("noise.alphas=[0.5]", "noise.candidates=2", "noise.halving=true")
    assert rungs(build_config(*dear)) == [Rung(2, 10)]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("noise.candidates=5", "noise.alphas=[0.0,1.0]"),
        ("noise.guidance_scale=2",),
        ("noise.halving=true",),
        ("noise.halving=true", "noise.candidates=11", "noise.guidance_scale=3"),
        ("noise.bank=pair", "mixing.groups_per_pair=3", "noise.halving=true"),
        ("noise.bank=run", "noise.candidates=16", "noise.halving=true"),
        ("mixing.classes=3", "mixing.grid=random", "annotation.rule=simplex"),
    ],
)
def test_the_rows_are_those_that_were_counted_beforehand(
    generator, embeddings, overrides, tiny_names
):
    config = build_config("noise.steps=6", "noise.candidates=8", *overrides)
    noise, points = config.noise, len(scoring_points(config))
    sets = 8 if noise.bank == "run" else 1
    choices = config.shards.groups_per_batch if noise.bank == "group" else 1
    rows, sizes = [], set()

    def count(module, inputs, output):
        rows.append(len(inputs[0]))

    def predict(latents, *rest):
        sizes.add(len(latents))
        return generator.predict(latents, *rest)

    scorer = scorer_of(
        generator,
        most_rows=production_batch(config),
        guidance_scale=noise.guidance_scale,
        predict=predict,
    )
    hook = generator.denoiser.network.register_forward_hook(count)
    with hook:
        select_noise(
            [range(100 * c, 100 * c + noise.candidates) for c in range(choices)],
            embeddings[[row % 6 for row in range(choices * sets * points)]],
            scorer=scorer,
            shape=generator.latent_shape,
            rungs=rungs(config),
            names=["a"] * choices,
            points=points,
        )
    assert sum(rows) == selection_rows(config, pairs=45)
    assert len(sizes) <= len(rungs(config))  # one size a rung: short batches are padded
    assert max(sizes) <= production_batch(config)


def test_without_padding_a_candidate_costs_two_passes_a_point():
    plain = build_config("noise.steps=10", "noise.candidates=8")
    assert selection_rows(plain, pairs=45) == 2 * 8 * 3 * 2 * 10
    guided = build_config("noise.steps=10", "noise.candidates=8", "noise.guidance_scale=5")
    assert selection_rows(guided, pairs=45) == 2 * (2 * 8 * 3 * 2 * 10)
    assert selection_rows(build_config("generator.steps=4"), pairs=45) == 2 * 8 * 3 * 2 * 4


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (64, 64), (65, 33), (192, 64), (129, 43)])
def test_batches_over_some_rows_have_one_size_and_little_padding(rows, size):
    assert rows_per_forward(rows, most=64) == size
    assert math.ceil(rows / size) * size - rows < math.ceil(rows / 64)


def test_one_candidate_is_taken_as_it_is(generator, embeddings):
    (choice,) = choose(generator, embeddings, seeds=[[42]], schedule=[Rung(1, STEPS)])
    assert (choice.best, choice.seeds) == ((0,), (42,))


def test_of_equal_candidates_the_first_is_kept(generator, embeddings):
    (choice,) = choose(
        generator,
        embeddings,
        seeds=[[9, 4, 4, 9]],
        schedule=[Rung(4, STEPS)],
        predict=lambda latents, *_: torch.tanh(latents),
        keep=4,
    )
    assert choice.scores[0] == choice.scores[3] != choice.scores[1] == choice.scores[2]
    assert choice.best in ((0, 3, 1, 2), (1, 2, 0, 3))


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
    assert choice.best == (1,)


def test_a_choice_without_any_score_is_named(generator, embeddings):
    message = "group 8: 0 of 2 candidate noises have a stability, 1 are needed; the network gave"
    with pytest.raises(FloatingPointError, match=message):
        choose(
            generator,
            embeddings,
            seeds=[[1, 2], [3, 4]],
            schedule=[Rung(2, STEPS)],
            predict=broken_for(3, 4),
        )


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

    scorer = scorer_of(generator, most_rows=5, predict=predict)
    noise = initial_noise([1, 2, 1, 2], generator.latent_shape).view(2, 2, 4, 8, 8)
    told = Conditioning(torch.tensor([0.1, 0.5, 0.5, 0.1]).view(4, 1, 1))
    found = scorer(noise, told, steps=STEPS)
    assert found.shape == (2, 2, 2)
    torch.testing.assert_close(found[0], found[1].flip(-1))
