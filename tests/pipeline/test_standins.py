"""Small models trained on your images: real loaders take them, they are reused; errors."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from semix.data.errors import InputError
from semix.data.files import published
from semix.data.pace import Throttle
from semix.data.real import ImageSplit, RealDataset
from semix.pipeline.prompts import prompts
from semix.pipeline.standins import Recipe, StandIns, TrainingStage, standins_digest, train_standins
from semix.pipeline.standins.diffusion import (
    encode,
    fold_standardisation,
    train_autoencoder,
    train_pipeline,
)
from semix.pipeline.standins.fitting import Batches, fit, load_images, seeded
from semix.pipeline.standins.recipe import Lines, Report, recipe_for
from semix.pipeline.standins.small_clip import contrastive_loss, train_clip
from semix.pipeline.standins.text import (
    build_tokenizer,
    captions_of,
    learn_merges,
    tokenise,
    words_of,
)
from semix.pipeline.standins.two_models import MIN_STEPS_FOR_PROCESS, one_thread

HASTY = Recipe(TrainingStage(2, 4, 1e-3), TrainingStage(2, 4, 1e-3), TrainingStage(2, 4, 1e-3))
ODD_NAMES = (
    "Great White-shark's fin",
    "café_noir",
    "東京 タワー",
    "it\u2019s {0} & <b>",
    "12",
    "21",
)
PHOTO = "a photo of a {class}"


def make_split(targets: Sequence[int], *, size: int, seed: int = 0) -> ImageSplit:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (len(targets), size, size, 3), dtype=np.uint8
    )
    return ImageSplit(
        np.array(targets, dtype=np.int64),
        load=lambda indices: pixels[indices],
        content=lambda _: hashlib.sha256(pixels.tobytes()).hexdigest(),
    )


def make_real(
    names: Sequence[str] = ODD_NAMES, *, size: int = 16, per_class: int = 2, seed: int = 0
) -> RealDataset:
    train = make_split([*range(len(names))] * per_class, size=size, seed=seed)
    nothing = make_split([], size=size)
    return RealDataset(tuple(names), train, nothing, nothing)


def silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


def load_pipeline(models: StandIns) -> StableDiffusionPipeline:
    pipeline = StableDiffusionPipeline.from_pretrained(
        models.diffusion, use_safetensors=True, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    return train_standins(
        make_real(), tmp_path_factory.mktemp("standins"), recipe=HASTY, progress=silent
    )


@pytest.fixture(scope="module")
def pipeline(models: StandIns) -> StableDiffusionPipeline:
    return load_pipeline(models)


# What the real loaders make of them


def test_diffusers_loads_the_pipeline_and_generates(pipeline):
    images = pipeline(
        prompts(PHOTO, ODD_NAMES)[0], num_inference_steps=2, guidance_scale=2.0, output_type="np"
    ).images
    assert images.shape == (1, 16, 16, 3)
    assert np.isfinite(images).all()
    assert type(pipeline.scheduler).__name__ == "DDIMScheduler"
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.vae.config.scaling_factor == 1.0


def test_every_class_has_a_prompt_embedding_of_its_own(pipeline):
    texts = ["", *prompts(PHOTO, ODD_NAMES)]
    embeddings = pipeline.encode_prompt(texts, "cpu", 1, False)[0].flatten(1)
    distances = torch.cdist(embeddings, embeddings) + torch.eye(len(texts)) * 1e9
    assert distances.min() > 2


def test_open_clip_loads_model_transform_and_tokenizer(models):
    name = f"local-dir:{models.clip}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    images = make_real().train.images()
    inputs = torch.stack([preprocess(Image.fromarray(image)) for image in images])
    # the transform standardises the images that the model was trained on
    torch.testing.assert_close(inputs.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(inputs.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    with torch.no_grad():
        image_features = model.encode_image(inputs)
        text_features = model.encode_text(tokenizer(prompts(PHOTO, ODD_NAMES)))
    assert image_features.shape == (len(images), HASTY.clip_features)
    distances = torch.cdist(text_features, text_features) + torch.eye(len(ODD_NAMES)) * 1e9
    assert distances.min() > 1e-3


@pytest.mark.process
def test_a_clip_trained_beside_is_the_one_trained_here(tmp_path):
    real, recipe = make_real(), replace(HASTY, clip=TrainingStage(MIN_STEPS_FOR_PROCESS, 4, 1e-3))
    models = train_standins(real, tmp_path, recipe=recipe, progress=silent)
    weights = load_file(models.clip / "open_clip_model.safetensors")
    captions = captions_of(ODD_NAMES, recipe.templates)
    with one_thread():
        local = train_clip(load_images(real.train, limit=99), ODD_NAMES, captions, recipe=recipe)
    for name, weight in local.model.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_a_reloaded_clip_is_the_one_that_was_trained(tmp_path):
    real = make_real()
    captions = captions_of(ODD_NAMES, HASTY.templates)
    images = load_images(real.train, limit=99)
    small = train_clip(images, ODD_NAMES, captions, recipe=HASTY, report=silent)
    small.save(tmp_path / "clip")
    name = f"local-dir:{tmp_path / 'clip'}"
    model, _, _ = open_clip.create_model_and_transforms(name)
    model.eval()  # attention takes another, equal way in training
    ids = open_clip.get_tokenizer(name)([texts[0] for texts in captions])
    with torch.no_grad():
        for actual, expected in (
            (model.encode_text(ids), small.model.encode_text(ids)),
            (model.encode_image(images.pixels), small.model.encode_image(images.pixels)),
        ):
            torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    assert ids.unique().max() < len(small.tokenizer)
    tokens = [small.tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
    assert tokens[0][:7] == [
        "<|startoftext|>", "a</w>", "photo</w>", "of</w>", "a</w>", "great</w>", "white</w>",
    ]  # fmt: skip
    # open_clip straightens quotes before its tokenizer sees them
    assert "'s</w>" in tokens[3]


def test_a_reloaded_autoencoder_is_the_one_that_was_trained(tmp_path):
    images = load_images(make_real().train, limit=99)
    trained = train_autoencoder(images, HASTY, silent)
    trained.save_pretrained(tmp_path, safe_serialization=True)
    loaded = type(trained).from_pretrained(tmp_path, use_safetensors=True)
    for actual, expected in zip(
        encode(loaded, images.pixels), encode(trained, images.pixels), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    latents = encode(trained, images.pixels)[0]
    with torch.no_grad():
        actual, expected = loaded.decode(latents).sample, trained.decode(latents).sample
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


@pytest.mark.parametrize("size", [24, 40, 72])
def test_any_multiple_of_eight_pixels_will_do(tmp_path, size):
    recipe = recipe_for(num_images=4, image_size=size)
    stage = TrainingStage(1, 2, 1e-3)
    hasty = replace(recipe, autoencoder=stage, denoiser=stage, clip=stage)
    real = make_real(["cat", "dog"], size=size)
    trained = train_standins(real, tmp_path, recipe=hasty, progress=silent)
    output = load_pipeline(trained)("a photo of a cat", num_inference_steps=1, output_type="np")
    assert output.images.shape == (1, size, size, 3)
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{trained.clip}")
    assert model.visual.image_size == (size, size)


def test_the_cards_name_the_classes(models):
    for folder in (models.diffusion, models.clip):
        assert "東京 タワー" in (folder / "README.md").read_text(encoding="utf-8")


# Trained once, published whole


def test_training_reports_its_stages_and_leaves_the_random_state(tmp_path):
    progress: dict[str, list[int]] = {}

    def report(stage: str, done: int, total: int) -> None:
        assert not list(tmp_path.glob("[!.]*/diffusion"))  # a kill here would leave no final folder
        progress.setdefault(stage, []).append(done)
        assert total == 2

    before = torch.get_rng_state()
    trained = train_standins(make_real(), tmp_path, recipe=HASTY, progress=report)
    torch.testing.assert_close(torch.get_rng_state(), before, atol=0, rtol=0)
    assert progress == {stage: [0, 1, 2] for stage in ("CLIP", "autoencoder", "denoiser")}
    assert set(trained.seconds) == set(progress)
    assert trained.diffusion.parent == trained.clip.parent
    assert trained.clip.parent.name == standins_digest(make_real(), HASTY)[:12]


def test_the_second_call_finds_the_models_of_the_first(models):
    def report(stage: str, done: int, total: int) -> None:
        raise AssertionError("trained again")

    def snapshot() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in models.clip.parent.rglob("*")}

    before = snapshot()
    root = models.clip.parents[1]
    result = train_standins(make_real(), root, recipe=HASTY, progress=report)
    assert result == replace(models, seconds={})
    assert snapshot() == before


def test_two_trainings_give_the_same_bytes(models, tmp_path):
    again = train_standins(make_real(), tmp_path, recipe=HASTY, progress=silent)
    first, second = models.clip.parent, again.clip.parent
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_an_interrupted_training_goes_on_with_the_networks_that_are_done(models, tmp_path):
    def train(interrupted: str, stages: set[str]) -> StandIns:
        def report(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            if stage == interrupted and done == 1:
                raise KeyboardInterrupt

        return train_standins(make_real(), tmp_path, recipe=HASTY, progress=report)

    digest = models.clip.parent.name
    folder, vae = tmp_path / f"{digest}.begun", "vae.safetensors"
    for stage, trained in (("autoencoder", []), ("denoiser", [vae]), ("CLIP", [vae])):
        with pytest.raises(KeyboardInterrupt):
            train(stage, set())
        assert not (tmp_path / digest).exists()
        assert [path.name for path in folder.glob("*")] == trained
    last = set[str]()
    again = train("", last)
    assert last == {"denoiser", "CLIP"}
    assert [path.name for path in tmp_path.iterdir()] == [digest]
    for path in models.clip.parent.rglob("*.safetensors"):
        other = again.clip.parent / path.relative_to(models.clip.parent)
        assert other.read_bytes() == path.read_bytes(), path


def test_of_two_trainers_the_first_to_finish_stays(tmp_path):
    final = tmp_path / "final"
    with published(final) as slow:
        slow.mkdir()
        (slow / "model").write_text("slow")
        with published(final) as fast:
            fast.mkdir()
            (fast / "model").write_text("fast")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (final / "model").read_text() == "fast"


def test_the_digest_follows_what_decides_the_weights():
    real = make_real()
    digest = standins_digest(real, HASTY)
    assert digest == standins_digest(make_real(), HASTY)
    other_digests = [
        standins_digest(make_real(seed=1), HASTY),
        standins_digest(replace(real, class_names=("other", *ODD_NAMES[1:])), HASTY),
        standins_digest(real, replace(HASTY, seed=1)),
        standins_digest(real, replace(HASTY, clip=TrainingStage(3, 4, 1e-3))),
    ]
    assert len({digest, *other_digests}) == 5


def test_only_the_training_split_counts():
    other = replace(
        make_real(), test=make_split([0, 1], size=16), validation=make_split([1], size=16)
    )
    assert standins_digest(other, HASTY) == standins_digest(make_real(), HASTY)


# What is refused


@pytest.mark.parametrize(
    ("names", "size", "per_class", "text"),
    [
        (["cat"], 16, 2, r"class_names = \['cat'\]: mixing needs at least two classes"),
        (["cat", "dog"], 16, 1, r"train = 1 images: class 'cat' needs at least 2 to learn from"),
        (["cat", "dog"], 8, 2, r"image_size = 8: choose a multiple of 8, at least 16"),
        (["cat", "dog"], 20, 2, r"image_size = 20: choose a multiple of 8, at least 16"),
        (["cat", "CAT"], 16, 2, r"'CAT': reads like 'cat' to the models; rename one of the two"),
        (["ice_cream", "Ice cream"], 16, 2, r"'Ice cream': reads like 'ice_cream'"),
        (["it's", "it\u2019s"], 16, 2, r"'it.s': reads like \"it's\" to the models"),
        (["cat", " "], 16, 2, r"' ': is blank; give the class a name"),
        (["cat", "a<|endoftext|>"], 16, 2, r"leave out <\|startoftext\|> and <\|endoftext\|>"),
        (["cat", "9" * 80], 16, 2, r"'9{80}': its caption has 86 tokens of at most 77; shorten"),
    ],
)
def test_unsuitable_data_is_refused(tmp_path, names, size, per_class, text):
    def report(stage: str, done: int, total: int) -> None:
        raise AssertionError("training began")

    real = make_real(names, size=size, per_class=per_class)
    with pytest.raises(InputError, match=text):
        train_standins(real, tmp_path, recipe=HASTY, progress=report)
    assert list(tmp_path.iterdir()) == []


def test_equal_pictures_are_refused(tmp_path):
    grey = np.full((4, 16, 16, 3), 128, dtype=np.uint8)
    train = ImageSplit(np.array([0, 0, 1, 1]), load=lambda i: grey[i], content=lambda _: "grey")
    real = replace(make_real(["cat", "dog"]), train=train)
    with pytest.raises(InputError, match="train = 4 equal images: give pictures that differ"):
        train_standins(real, tmp_path, recipe=HASTY, progress=silent)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(InputError, match=r"folder = .*file: cannot be made: File exists"):
        train_standins(make_real(), path, recipe=HASTY, progress=silent)


# Tokenizer, losses, autoencoder, batches


def test_merges_by_hand():
    # "ab" twice, inside "cab" at a word's end as well: a+b first, then c
    assert learn_merges(["ab", "cab"]) == [("a", "b</w>"), ("c", "ab</w>")]
    assert learn_merges(["aaab"]) == [("a", "a"), ("aa", "a"), ("aaa", "b</w>")]
    assert learn_merges(["a"]) == []


def test_each_known_word_is_one_token_and_any_other_is_spelt():
    names = [
        f"{first} {second}" for first in ("Aab", "baa", "aaa", "ÄÖ") for second in ("ab", "ba")
    ]
    tokenizer = build_tokenizer(names, captions_of(names, [PHOTO]))
    for word in ("aab", "baa", "aaa", "äö", "ab", "ba", "photo", "of"):
        assert len(tokenizer.tokenize(word)) == 1, word
        assert tokenizer.tokenize(word.upper()) == tokenizer.tokenize(word)
    token_ids = tokenizer("zebra 東 9", add_special_tokens=False)["input_ids"]
    assert not set(token_ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(token_ids) == "zebra 東 9"


def test_two_hundred_classes_are_told_apart_and_fit():
    names = [f"Model-{index} of the year {index * 37}" for index in range(200)]
    captions = captions_of(names, [PHOTO])
    tokenizer = build_tokenizer(names, captions)
    ids = tokenise(tokenizer, [texts[0] for texts in captions])
    assert len(ids.unique(dim=0)) == 200
    assert (ids[:, -1] == tokenizer.eos_token_id).all()  # nothing was cut off
    assert len(tokenizer) < 1000


def test_words_are_split_as_clip_splits_them():
    assert words_of(["A cat's  photo-12"]) == ["'s", "-", "1", "2", "a", "cat", "photo"]


def test_all_pairs_of_a_class_match():
    # two of one class: equal similarities are best
    alike = torch.zeros(2, 2, requires_grad=True)
    loss = contrastive_loss(alike, torch.tensor([3, 3]))
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(math.log(2)))
    torch.testing.assert_close(alike.grad, torch.zeros(2, 2))
    # two classes: the usual loss, -log of e^2 / (e^2 + e^0)
    result = contrastive_loss(2 * torch.eye(2), torch.tensor([0, 1]))
    torch.testing.assert_close(result, torch.tensor(math.log(1 + math.exp(-2))))


def test_standardisation_is_folded_in_exactly():
    images = load_images(make_real().train, limit=99)
    vae = train_autoencoder(images, HASTY, silent)
    means, deviations = encode(vae, images.pixels)
    with torch.no_grad():
        decoded = vae.decode(means).sample
    shift, scale = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([2.0, 0.5, 4.0, 1.5])
    fold_standardisation(vae, shift, scale)
    new_means, new_deviations = encode(vae, images.pixels)
    shift, scale = shift.view(-1, 1, 1), scale.view(-1, 1, 1)
    torch.testing.assert_close(new_means, (means - shift) / scale, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(new_deviations, deviations / scale, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(vae.decode(new_means).sample, decoded, atol=1e-5, rtol=1e-5)


def test_latents_have_mean_zero_and_deviation_one():
    images = load_images(make_real(per_class=10).train, limit=99)
    means, deviations = encode(train_autoencoder(images, HASTY, silent), images.pixels)
    variance = means.var(dim=(0, 2, 3)) + deviations.square().mean(dim=(0, 2, 3))
    torch.testing.assert_close(means.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(variance, torch.ones(4), atol=1e-4, rtol=0)


def test_batches_bring_every_index_once_a_round():
    rng = torch.Generator().manual_seed(0)
    draw = Batches(4, 6, rng=rng)
    indices = torch.cat([next(draw), next(draw)])  # three rounds of four
    assert [sorted(chunk.tolist()) for chunk in indices.split(4)] == [[0, 1, 2, 3]] * 3


class Cut(Exception):
    pass


@pytest.mark.parametrize("train", ["autoencoder", "pipeline", "clip"])
def test_a_training_that_is_cut_goes_on_bit_by_bit(train, tmp_path, monkeypatch):
    monkeypatch.setattr("semix.pipeline.standins.fitting.SECONDS_BETWEEN_STATES", 0.0)
    names = ("cat", "dog")
    images = load_images(make_real(names, per_class=10).train, limit=99)
    captions = captions_of(names, HASTY.templates)
    stage = TrainingStage(6, 4, 1e-3)
    recipe = replace(HASTY, autoencoder=stage, denoiser=stage, clip=stage)

    def trained(report: Report, state: Path | None) -> dict[str, torch.Tensor]:
        if train == "autoencoder":
            return train_autoencoder(images, recipe, report, state=state).state_dict()
        if train == "clip":
            clip = train_clip(images, names, captions, recipe=recipe, report=report, state=state)
            return clip.model.state_dict()
        pipeline = train_pipeline(
            images,
            captions,
            vae=train_autoencoder(images, HASTY, silent),
            tokenizer=build_tokenizer(names, captions),
            recipe=recipe,
            report=report,
            state=state,
        )
        return {**pipeline.unet.state_dict(), **pipeline.text_encoder.state_dict()}

    def cut(stage: str, done: int, total: int) -> None:
        if done == 3:
            raise Cut

    whole, state = trained(silent, None), tmp_path / "work" / "state.safetensors"
    with pytest.raises(Cut):
        trained(cut, state)
    begun: list[int] = []
    again = trained(lambda stage, done, total: begun.append(done), state)
    assert begun[0] == 3
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_a_limit_takes_the_first_images_of_every_class():
    split = make_split([0, 0, 0, 1, 1, 0], size=16)
    images = load_images(split, limit=4)
    assert images.targets.tolist() == [0, 0, 1, 1]
    expected = torch.from_numpy(split.images([0, 1, 3, 4])).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(images.pixels, expected)
    assert images.pixels.min() == -1


def test_fit_learns_and_leaves_the_averaged_weights():
    with seeded(0):
        line = torch.nn.Linear(1, 1)
    inputs = torch.linspace(-1, 1, 32).view(-1, 1)
    weights = []

    def loss() -> torch.Tensor:
        weights.append(line.weight.item())
        return torch.nn.functional.mse_loss(line(inputs), 3 * inputs + 1)

    draw = Batches(32, 32, rng=torch.Generator())
    stage = TrainingStage(300, 1, 0.1)
    assert list(fit([line], loss, stage=stage, average_decay=0.9, draw=draw)) == [*range(301)]
    torch.testing.assert_close(line.weight, torch.tensor([[3.0]]), atol=0.05, rtol=0)
    torch.testing.assert_close(line.bias, torch.tensor([1.0]), atol=0.05, rtol=0)
    assert line.weight.item() not in weights
    assert not line.training
    assert not line.weight.requires_grad


def test_lines_tell_rate_and_time(capsys):
    lines = Lines()
    for done in range(4):
        lines("denoiser", done, 3)
    assert capsys.readouterr().err.startswith("denoiser: 3/3, ")
    lines.throttle = Throttle(0)
    lines("denoiser", 1, 3)
    assert " steps/s, " in (shown := capsys.readouterr().err)
    assert shown.endswith(" s left\n")
