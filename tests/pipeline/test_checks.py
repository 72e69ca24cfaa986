"""What is refused before any model is loaded, and what is recorded of the models."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from semix.data.errors import InputError
from semix.data.fingerprint import file_digest
from semix.data.settings import load_settings
from semix.pipeline.checks import check_generator, check_models, check_prompts, notes
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.model_paths import local_path, lora_file
from semix.pipeline.provenance import model_identities

WEIGHTS = "pytorch_lora_weights.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def check(model: Path | str, **changes: Any) -> None:
    config = load_settings(GeneratorConfig, {"model": str(model)} | changes)
    check_generator(config)


@pytest.fixture
def copy_model(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a model's directory that a test may spoil."""

    def copy(model: Path) -> Path:
        return Path(shutil.copytree(model, tmp_path / "model"))

    return copy


def test_good_models_of_every_family_pass(tiny_sd, tiny_sdxl, tiny_dit):
    check(tiny_sd)
    check(tiny_sdxl, family="sdxl")
    check(tiny_dit, family="dit")


@pytest.mark.process
def test_checking_needs_no_heavy_library():
    script = (
        "import sys; from semix.pipeline.checks import check_generator;"
        "from semix.pipeline.config import GeneratorConfig;"
        f"check_generator(GeneratorConfig(model='a/b', revision='{COMMIT}'));"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'peft') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_model_of_another_family_is_told_apart(tiny_sd, tiny_sdxl, tiny_dit, copy_model):
    message = (
        r"generator\.model = .*: holds a StableDiffusionXLPipeline; family stable_diffusion "
        r"needs a StableDiffusionPipeline; set generator\.family to sdxl$"
    )
    with pytest.raises(InputError, match=message):
        check(tiny_sdxl)
    with pytest.raises(InputError, match=r"family sdxl needs .*; set generator\.family to dit$"):
        check(tiny_dit, family="sdxl")
    with pytest.raises(
        InputError, match=r"family dit needs a DiTPipeline; set .* stable_diffusion"
    ):
        check(tiny_sd, family="dit")
    model = copy_model(tiny_sd)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "KolorsPipeline"}))
    with pytest.raises(InputError, match=r"KolorsPipeline; .* needs a StableDiffusionPipeline$"):
        check(model)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_weights_that_are_not_safetensors_are_refused(tiny_sd, copy_model, part):
    model = copy_model(tiny_sd)
    for path in (model / part).glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(InputError, match=rf"generator\.model = .*{part}: has no safetensors; con"):
        check(model)
    (model / part / "model.safetensors").touch()
    check(model)  # with both formats, only safetensors is read


def test_a_safety_checker_is_named_as_left_out(tiny_sd, copy_model, hasty_config):
    folder = copy_model(tiny_sd)
    index = folder / "model_index.json"
    components = json.loads(index.read_text())
    components["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index.write_text(json.dumps(components))
    config = load_settings(BuildConfig, hasty_config.model_dump(), [f"generator.model={folder}"])
    (note,) = notes(config)
    assert note.startswith(f"StableDiffusionSafetyChecker of {folder} is left out")
    assert notes(hasty_config) == []


def test_a_safety_checker_in_another_format_does_not_matter(tiny_sd, copy_model):
    model = copy_model(tiny_sd)
    (model / "safety_checker").mkdir()
    (model / "safety_checker" / "pytorch_model.bin").touch()
    index = json.loads((model / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (model / "model_index.json").write_text(json.dumps(index))
    check(model)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (r"generator\.unet", {"unet": "/nowhere"}),
        (r"generator\.lora", {"lora": [{"path": "/nowhere"}]}),
        (r"generator\.tiny_decoder", {"tiny_decoder": "/nowhere"}),
    ],
)
def test_additions_that_are_not_there_are_refused(tiny_sd, field, changes):
    with pytest.raises(
        InputError, match=rf"^{field} = /nowhere: there is no such f(older|ile or directory)$"
    ):
        check(tiny_sd, **changes)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (r"generator\.unet", {"unet": "FOLDER"}),
        (r"generator\.lora", {"lora": [{"path": "FOLDER"}]}),
        (r"generator\.tiny_decoder", {"tiny_decoder": "FOLDER"}),
        (r"generator\.lora", {"lora": [{"path": "FOLDER/x.bin"}]}),
    ],
)
def test_additions_in_another_format_are_refused(tiny_sd, tmp_path, field, changes):
    (tmp_path / "x.bin").touch()
    settings = json.loads(json.dumps(changes).replace("FOLDER", str(tmp_path)))
    with pytest.raises(InputError, match=rf"^{field} = .*safetensors.*; convert it"):
        check(tiny_sd, **settings)


def test_a_unet_must_be_the_unets_own_directory(tiny_sd):
    check(tiny_sd, unet=str(tiny_sd / "unet"))
    with pytest.raises(InputError, match=r"generator\.unet = .*: is not a U-Net directory"):
        check(tiny_sd, unet=str(tiny_sd))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("generator.revision", {}),
        ("generator.revision", {"revision": "main"}),
        ("generator.unet_revision", {"unet": "some/unet"}),
        (
            "generator.lora revision",
            {"lora": [{"path": "some/lora", "weight_name": "x.safetensors"}]},
        ),
        ("generator.tiny_decoder_revision", {"tiny_decoder": "some/taesd"}),
    ],
)
def test_what_comes_from_the_hub_is_pinned(field, changes):
    base = {} if field == "generator.revision" else {"revision": COMMIT}
    value = changes.get("revision", "nothing")
    with pytest.raises(InputError, match=rf"^{field} = {value}: pin the commit of some/"):
        check("some/model", **base, **changes)
    check("some/model", revision=COMMIT)


def test_a_scheduler_that_draws_noise_is_refused_unless_another_is_named(tiny_sdxl_turbo):
    message = r"generator\.scheduler = nothing: the model's own EulerAncestralDiscreteScheduler may"
    with pytest.raises(InputError, match=message):
        check(tiny_sdxl_turbo, family="sdxl")
    check(tiny_sdxl_turbo, family="sdxl", scheduler="euler")


def test_chosen_noise_wants_a_schedule_that_can_be_inverted(tiny_sd, copy_model, hasty_config):
    model = copy_model(tiny_sd)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0}
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    with pytest.raises(InputError, match=r"scheduler = ddim: cannot follow .* FlowMatchEuler"):
        check(model, scheduler="ddim")
    # A kind that may sample, yet has no betas.
    scheduler = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"}
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))

    def config(strategy: str) -> BuildConfig:
        changes = [f"generator.model={model}", f"noise.strategy={strategy}"]
        return load_settings(BuildConfig, hasty_config.model_dump(), changes)

    check_models(config("random"))
    with pytest.raises(
        InputError, match=r"noise\.strategy = select: cannot follow the model's Uni"
    ):
        check_models(config("select"))


def test_paths_are_told_from_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "here").mkdir(parents=True)
    assert local_path("/nowhere") == Path("/nowhere")
    assert local_path("./nowhere") == Path("nowhere")
    assert local_path("~/nowhere") == tmp_path / "nowhere"
    assert local_path("owner/here") == Path("owner/here")
    assert local_path("owner/elsewhere") is None


def test_which_file_is_meant_must_be_clear(tmp_path, monkeypatch):
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / WEIGHTS).touch()

    def file_of(path: str, **more: Any) -> tuple[str, str | None]:
        loras = load_settings(GeneratorConfig, {"model": "m", "lora": [{"path": path} | more]}).lora
        return lora_file(loras[0].model_copy(update={"revision": COMMIT}))

    assert file_of(str(lora)) == (str(lora), WEIGHTS)
    assert file_of(str(lora / WEIGHTS)) == (str(lora), WEIGHTS)
    assert file_of("some/style", weight_name="x.safetensors") == ("some/style", "x.safetensors")
    monkeypatch.setenv("HOME", str(lora.parent))
    assert file_of(f"~/{lora.name}") == (str(lora), WEIGHTS)
    monkeypatch.chdir(lora.parent)
    assert file_of(f"./{lora.name}") == (lora.name, WEIGHTS)
    with pytest.raises(InputError, match=r"lora = /no: there is no such file"):
        file_of("/no")
    with pytest.raises(InputError, match="has no safetensors; convert it"):
        file_of(str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").touch()
    with pytest.raises(InputError, match=r"holds a\.safetensors, b\.safetensors; choose one as"):
        file_of(str(tmp_path))
    assert file_of(str(tmp_path), weight_name="b.safetensors") == (str(tmp_path), "b.safetensors")
    with pytest.raises(InputError, match=r"lora\.bin is no safetensors file; convert it"):
        file_of("someone/style", weight_name="lora.bin")
    with pytest.raises(
        InputError, match="style: may hold several files; choose one as weight_name"
    ):
        file_of("someone/style")


def test_paths_from_home_are_checked_and_recorded(tiny_sd, monkeypatch, hasty_config):
    monkeypatch.setenv("HOME", str(tiny_sd.parent))
    model = f"~/{tiny_sd.name}"
    check(model)
    with pytest.raises(InputError, match="nowhere: there is no such folder"):
        check("~/nowhere")
    config = load_settings(BuildConfig, hasty_config.model_dump(), [f"generator.model={model}"])
    assert "unet/config.json" in model_identities(config)["generator"]["files"]


def test_all_parts_of_the_generator_are_recorded(tiny_sd, hasty_config, tmp_path):
    lora = tmp_path / "lora.safetensors"
    lora.write_bytes(b"weights")
    generator = {
        "model": "some/model",
        "revision": COMMIT,
        "unet": str(tiny_sd / "unet"),
        "lora": [{"path": str(lora)}, {"path": "some/lora", "revision": COMMIT}],
        "tiny_decoder": "some/taesd",
        "tiny_decoder_revision": COMMIT,
    }
    config = load_settings(BuildConfig, hasty_config.model_dump() | {"generator": generator})
    record = model_identities(config)["generator"]
    assert record["model"] == "some/model"
    assert record["revision"] == COMMIT
    assert record["files"] == {}
    weights = tiny_sd / "unet" / "diffusion_pytorch_model.safetensors"
    assert record["unet"]["files"][weights.name] == file_digest(weights)
    assert record["lora"][0]["files"] == {"lora.safetensors": file_digest(lora)}
    assert record["lora"][1] == {"model": "some/lora", "revision": COMMIT, "files": {}}
    assert record["tiny_decoder"] == {"model": "some/taesd", "revision": COMMIT, "files": {}}
    lora.write_bytes(b"others")
    assert model_identities(config)["generator"] != record


@pytest.mark.process
def test_a_root_is_begun_without_torch(hasty_config, tmp_path):
    """The import takes seconds, which the first shard or an error would wait for."""
    script = """
import sys
from semix.pipeline.config import BuildConfig
from semix.pipeline.root import create_build

create_build(BuildConfig.model_validate_json(sys.argv[1]), sys.argv[2])
print("torch" in sys.modules, "open_clip" in sys.modules)
"""
    command = [sys.executable, "-c", script, hasty_config.model_dump_json(), str(tmp_path / "new")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.strip() == "False False", result.stderr


def test_a_unet_that_does_not_say_its_size_is_refused(tiny_sd, copy_model):
    """The default of diffusers is a config without it."""
    folder = copy_model(tiny_sd)
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sample_size": None}))
    match = r"the config of its U-Net has no sample_size; add sample_size: the side of"
    with pytest.raises(InputError, match=rf"^generator\.model = .*: {match}"):
        check(folder)
    with pytest.raises(InputError, match=rf"^generator\.unet = .*: {match}"):
        check(tiny_sd, unet=str(folder / "unet"))
    check(folder, unet=str(tiny_sd / "unet"))


@pytest.mark.parametrize(
    ("fixture", "family", "part"),
    [
        ("tiny_sd", "stable_diffusion", "tokenizer"),
        ("tiny_flux", "flux", "tokenizer"),
        ("tiny_flux", "flux", "tokenizer_2"),
        ("tiny_flux2", "flux2", "tokenizer"),
    ],
)
def test_tokenizers_of_no_kind_read_as_those_of_their_kind(
    fixture, family, part, copy_model, request
):
    """transformers 5 saves some tokenizers without their kind."""
    model = request.getfixturevalue(fixture)
    folder = copy_model(model)
    for name, key in (("model_index.json", part), (f"{part}/tokenizer_config.json", "")):
        content = json.loads((folder / name).read_text())
        content |= {key: ["transformers", "TokenizersBackend"]} if key else {}
        if not key:
            content["tokenizer_class"] = "TokenizersBackend"
        (folder / name).write_text(json.dumps(content))
    usual, other = (
        GeneratorConfig(family=family, model=str(path), steps=1, guidance_scale=0)
        for path in (model, folder)
    )
    check_prompts(other, ["dog"])
    condition = load_generator(other, device="cpu").encode(["dog"])
    expected = load_generator(usual, device="cpu").encode(["dog"])
    assert torch.equal(condition.tokens, expected.tokens)
    long = other.model_copy(update={"prompt": "a {class}" + " and a dog" * 300})
    with pytest.raises(InputError, match=r"^generator\.prompt = .* tokens, the model reads"):
        check_prompts(long, ["dog"])


@pytest.mark.parametrize(
    ("setting", "count"),
    [("scale=20", 1), ("scale=4", 0), ("scale=auto", 0), ("rule=mixing_ratio", 0)],
)
def test_a_scale_that_makes_labels_nearly_hard_is_said(hasty_config, setting, count):
    lines = notes(load_settings(BuildConfig, hasty_config.model_dump(), [f"annotation.{setting}"]))
    assert len(lines) == count
    assert all("gives an average real image the label 0.99995" in note for note in lines)
