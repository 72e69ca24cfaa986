"""Models that an attacker prepared or names in a root: none is fetched, no pickle is read."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.pretrained import _PRETRAINED, get_pretrained_cfg

from semix.data.errors import InputError
from semix.data.root import PLAN, Root
from semix.data.settings import load_settings
from semix.pipeline.checks import check_clip, check_models
from semix.pipeline.clip import ClipEncoder, image_tower
from semix.pipeline.config import AnnotationConfig, BuildConfig, EncoderConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.provenance import identity
from semix.pipeline.worker import CONFIGURATION

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHECKOUT = Path(__file__).parents[2]

LOADING = """
import json, sys
from semix.data.settings import load_settings
from semix.pipeline.annotate import Encoders
from semix.pipeline.config import AnnotationConfig, GeneratorConfig
from semix.pipeline.generators import load_generator

for kind, settings in json.load(sys.stdin):
    try:
        if kind == "generator":
            load_generator(load_settings(GeneratorConfig, settings), device="cpu")
        else:
            Encoders(load_settings(AnnotationConfig, settings), device="cpu").load()
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
    else:
        print("loaded")
"""


class Trap:
    def __reduce__(self):
        return pytest.fail, ("the weights ran code",)


def pickled() -> bytes:
    """What `torch.save` writes: an archive with a pickle in it."""
    content = io.BytesIO()
    torch.save({"visual.proj": Trap()}, content)
    return content.getvalue()


class Hub:
    """A hub that has nothing and records the paths of all requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_POST = do_GET

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of a process whose user is logged in to this hub."""
        return os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "HF_TOKEN": "hf_secret",
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(CHECKOUT),
        }


@pytest.fixture
def hub() -> Iterator[Hub]:
    instance = Hub()
    thread = threading.Thread(target=instance.server.serve_forever, daemon=True)
    thread.start()
    yield instance
    instance.server.shutdown()
    instance.server.server_close()
    thread.join()


@pytest.fixture
def run(hub, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run Python with these arguments, its hub being `hub`."""

    def run_python(*arguments: object, text: str = "") -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            input=text,
            capture_output=True,
            text=True,
            env=hub.environment(tmp_path / "hf"),
            cwd=CHECKOUT,
        )

    return run_python


def hub_settings(tiny_sd: Path, clip: Path, **revision: str) -> list[tuple[str, dict]]:
    """Settings that name something on the hub, one for each setting that can."""
    local, clip_settings = {"model": str(tiny_sd)}, {"model": f"local-dir:{clip}"}
    tiny = {"tiny_decoder": "some/tiny"} | {f"tiny_decoder_{n}": c for n, c in revision.items()}
    unet = {"unet": "some/unet"} | {f"unet_{n}": c for n, c in revision.items()}
    lora = {"path": "some/lora", "weight_name": "x.safetensors", **revision}
    return [
        ("generator", {"model": "some/model", **revision}),
        ("generator", local | unet),
        ("generator", local | {"lora": [lora]}),
        ("generator", local | tiny),
        ("annotation", {"model": "hf-hub:some/clip", **revision}),
        ("annotation", clip_settings | {"second": {"model": "hf-hub:some/second", **revision}}),
    ]


@pytest.mark.process
def test_a_root_that_names_unpinned_models_makes_nobody_ask_for_them(
    hub, run, tiny_sd, hasty_standins
):
    """The attacker's plan names his repositories by branch, to learn the token of who looks."""
    cases = hub_settings(tiny_sd, hasty_standins.clip)
    cases += hub_settings(tiny_sd, hasty_standins.clip, revision="main")
    local = [
        ("generator", {"model": str(tiny_sd)}),
        ("annotation", {"model": f"local-dir:{hasty_standins.clip}"}),
    ]
    result = run("-c", LOADING, text=json.dumps(cases + local))
    lines = result.stdout.splitlines()
    assert lines[len(cases) :] == ["loaded", "loaded"], result.stderr
    for line, (_, settings) in zip(lines, cases, strict=False):
        assert "pin the commit of" in line, (line, settings)
    assert hub.requests == []


@pytest.mark.process
def test_of_a_pinned_model_that_very_commit_is_asked_for(hub, run, tiny_sd, hasty_standins):
    """The attacker moves a branch: nobody follows, as only the commit is ever named."""
    cases = hub_settings(tiny_sd, hasty_standins.clip, revision=COMMIT)
    result = run("-c", LOADING, text=json.dumps(cases))
    lines = result.stdout.splitlines()
    assert len(lines) == len(cases), result.stderr
    for line in lines:
        assert line.startswith("InputError"), line
    for name in ("model", "unet", "lora", "tiny", "clip", "second"):
        paths = [path for path in hub.requests if f"some/{name}" in path]
        assert paths, name
        assert all(COMMIT in path for path in paths), paths


@pytest.fixture
def foreign(root) -> Callable[..., Root]:
    """foreign(*overrides): a finished root whose plan was changed, as its maker can."""

    def change_plan(*overrides: str) -> Root:
        plan = root.plan
        config = load_settings(BuildConfig, plan.config, overrides)
        digest = identity(config, plan.class_names, plan.models)
        changes = {"config": config.model_dump(mode="json"), "digest": digest}
        root.store.put(PLAN, plan.model_copy(update=changes).written())
        return Root(root.url)

    return change_plan


@pytest.mark.process
@pytest.mark.parametrize(
    ("override", "field", "command", "status"),
    [
        (
            "generator.model=attacker/model",
            "generator.revision",
            ("semix.flows.cli", "show", "URL", 0, "--regenerate", "--device", "cpu"),
            2,
        ),
        (
            "annotation.model=hf-hub:attacker/clip",
            "annotation.revision",
            ("semix.pipeline.worker", "URL", "--device", "cpu"),
            CONFIGURATION,
        ),
    ],
)
def test_neither_a_look_nor_a_worker_asks_for_what_a_root_does_not_pin(
    hub, run, foreign, override, field, command, status
):
    """The attacker hands over a root; its user makes a series anew, or resumes it."""
    root = foreign(override)
    if status == CONFIGURATION:
        shutil.rmtree(Path(root.url) / "shards")  # there is something to make
    result = run("-m", *(root.url if word == "URL" else word for word in command))
    assert result.returncode == status, result.stderr
    assert f"{field} = nothing: pin the commit of" in result.stderr
    assert hub.requests == []


@pytest.mark.process
def test_of_a_tag_the_safetensors_alone_are_asked_for(hub, run):
    """The attacker takes the safetensors of a tag away: no pickle is fetched in their place."""
    tag = {"model": "ViT-B-32-quickgelu", "pretrained": "openai"}
    result = run("-c", LOADING, text=json.dumps([("annotation", tag)]))
    assert "has no open_clip_model.safetensors on the hub" in result.stdout, result.stderr
    file = "timm/vit_base_patch32_clip_224.openai/resolve/main/open_clip_model.safetensors"
    assert {path.lstrip("/") for path in hub.requests if "timm" in path} == {file}


def assert_refused(match: str, model: str, pretrained: str | None = None) -> None:
    """Both the check before a build and the loader refuse the model."""
    with pytest.raises(InputError, match=match):
        check_clip(AnnotationConfig(model=model, pretrained=pretrained))
    with pytest.raises(InputError, match=match):
        ClipEncoder(EncoderConfig(model=model, pretrained=pretrained), device="cpu")


@pytest.mark.parametrize("other", ["", "model.safetensors", "weights.safetensors"])
@pytest.mark.parametrize("name", ["open_clip_pytorch_model.bin", "pytorch_model.bin", "model.pth"])
def test_a_clip_folder_with_a_pickle_is_refused(clip, name, other):
    """The attacker's weights are a pickle, which open_clip takes before most safetensors."""
    weights = clip / "open_clip_model.safetensors"
    if other:
        shutil.copy(weights, clip / other)
    weights.unlink()
    (clip / name).write_bytes(pickled())
    assert_refused(
        rf"{name}: is no safetensors file, and no other is read; convert", f"local-dir:{clip}"
    )


def test_a_pickle_beside_the_safetensors_of_a_clip_is_never_read(clip):
    """The attacker lays a pickle beside genuine weights."""
    for name in ("open_clip_pytorch_model.bin", "a.bin", "model.pth"):
        (clip / name).write_bytes(pickled())
    ClipEncoder(EncoderConfig(model=f"local-dir:{clip}"), device="cpu")


@pytest.mark.parametrize("name", ["ViT-B-32.pt", "clip.bin", "clip.pth", "clip.npz", "openclip"])
def test_a_file_of_another_format_is_refused_with_what_works(tmp_path, name):
    """The attacker offers weights as torch or numpy save them, or as TorchScript."""
    path = tmp_path / name
    path.write_bytes(pickled())
    match = (
        rf"annotation\.pretrained = .*{name}: is no safetensors file.*format.md.*has openai, laion"
    )
    assert_refused(match, "ViT-B-32", str(path))


def test_every_tag_of_open_clip_is_safetensors_or_refused_by_name():
    """The attacker names a tag whose weights are a pickle, before anything is downloaded."""
    unfit = set()
    for model, tags in _PRETRAINED.items():
        for tag in tags:
            if not get_pretrained_cfg(model, tag)["hf_hub"].endswith("/"):
                unfit.add(model)
                assert_refused(
                    r"pretrained = .*: its weights are no safetensors, and no other", model, tag
                )
    assert "ViTamin-S" in unfit
    check_clip(AnnotationConfig(model="ViT-B-32-quickgelu", pretrained="openai"))


@pytest.mark.parametrize("content", [pickled(), pickle.dumps(Trap()), b""])
def test_a_pickle_named_safetensors_is_refused_in_our_words(clip, tmp_path, content):
    """The attacker renames a pickle."""
    (clip / "open_clip_model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="its weights are no whole safetensors file"):
        ClipEncoder(EncoderConfig(model=f"local-dir:{clip}"), device="cpu")


@pytest.mark.parametrize(
    ("tower", "settings"),
    [
        ("text_cfg", {"hf_model_name": "attacker/text"}),
        ("vision_cfg", {"timm_model_name": "hf-hub:attacker/tower"}),
        ("vision_cfg", {"timm_model_name": "hf_hub:attacker/tower"}),
        ("vision_cfg", {"timm_model_name": "local-dir:/somewhere"}),
    ],
)
def test_a_clip_whose_tower_comes_from_elsewhere_is_refused(clip, tower, settings):
    """The attacker's own pinned model names an unpinned one in its settings."""
    content = json.loads((clip / "open_clip_config.json").read_text())
    content["model_cfg"][tower] |= settings
    (clip / "open_clip_config.json").write_text(json.dumps(content))
    assert_refused(
        rf"annotation\.model = .*: its {tower} downloads .*without a pinned commit",
        f"local-dir:{clip}",
    )
    with pytest.raises(InputError, match="without a pinned commit"):
        image_tower(EncoderConfig(model=f"local-dir:{clip}"), "annotation")


def test_a_clip_by_name_whose_text_tower_is_asked_for_is_refused():
    """Of such a model open_clip asks the hub for the settings of another one, without a commit."""
    assert_refused("downloads roberta-base from the hub", "roberta-ViT-B-32", "laion2b_s12b_b32k")


def test_weights_of_a_tag_are_as_open_clip_would_load_them(clip, tmp_path, monkeypatch):
    """From the hub's cache, with the tag's own preprocessing, although semix finds the file."""
    settings = json.loads((clip / "open_clip_config.json").read_text())["model_cfg"]
    tag = {**get_pretrained_cfg("ViT-B-32", "openai"), "hf_hub": "owner/small/"}
    tag |= {"mean": (0.1, 0.2, 0.3), "interpolation": "bilinear", "resize_mode": "squash"}
    cached = tmp_path / "hub" / "models--owner--small"
    shutil.copytree(clip, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    monkeypatch.setitem(_PRETRAINED, "small", {"good": tag})
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", settings)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    encoder = ClipEncoder(EncoderConfig(model="small", pretrained="good"), device="cpu")
    reference = open_clip.create_model("small", pretrained="good").eval()
    assert encoder.settings == reference.visual.preprocess_cfg
    pixels = torch.rand(2, 3, *[reference.visual.image_size[0]] * 2)
    with torch.inference_mode():
        expected = reference.encode_image(pixels)
        torch.testing.assert_close(encoder.model.encode_image(pixels), expected, rtol=0, atol=0)


@pytest.fixture
def model(tiny_sd, tmp_path) -> Path:
    shutil.copytree(tiny_sd, tmp_path / "model")
    return tmp_path / "model"


def assert_generator_refused(match: str, hasty_config: BuildConfig, *overrides: str) -> None:
    """Both the check before a build and the loader refuse the model."""
    config = load_settings(BuildConfig, hasty_config.model_dump(), overrides)
    with pytest.raises(InputError, match=match):
        check_models(config)
    with pytest.raises(InputError, match=match):
        load_generator(config.generator, device="cpu")


@pytest.mark.parametrize("target", ["evil.bin", "../evil.safetensors", "/etc/x.safetensors"])
@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_an_index_names_safetensors_beside_it(model, hasty_config, part, target):
    """The attacker's index of shards leads to a pickle, or out of the folder."""
    weights = next((model / part).glob("*.safetensors"))
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": weights.name, "b": target}}
    (model / part / f"{weights.name}.index.json").write_text(json.dumps(index))
    (model / part / "evil.bin").write_bytes(pickled())
    match = r"safetensors\.index\.json: weight_map names .*which is no safetensors file beside it"
    assert_generator_refused(match, hasty_config, f"generator.model={model}")
    if part == "unet":
        assert_generator_refused(match, hasty_config, f"generator.unet={model / part}")


def test_a_config_names_safetensors_beside_it(model, hasty_config):
    """The attacker's text encoder names a pickle as its weights."""
    path = model / "text_encoder" / "config.json"
    config = json.loads(path.read_text()) | {"transformers_weights": "adapter_model.bin"}
    path.write_text(json.dumps(config))
    (model / "text_encoder" / "adapter_model.bin").write_bytes(pickled())
    match = r"config\.json: transformers_weights names 'adapter_model\.bin', which is no safeten"
    assert_generator_refused(match, hasty_config, f"generator.model={model}")


def test_an_adapter_that_names_its_base_is_refused(model, hasty_config):
    """The attacker's text encoder is an adapter of a model that the hub would be asked for."""
    (model / "text_encoder" / "config.json").unlink()
    adapter = {"base_model_name_or_path": "attacker/base", "peft_type": "LORA"}
    (model / "text_encoder" / "adapter_config.json").write_text(json.dumps(adapter))
    match = r"adapter_config\.json: names a model to be fetched"
    assert_generator_refused(match, hasty_config, f"generator.model={model}")


def test_a_part_of_another_kind_or_place_is_refused(model, hasty_config):
    """The attacker's index names a network that fetches others, or leaves a folder out."""
    path = model / "model_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"text_encoder": ["transformers", "DetrModel"]}))
    assert_generator_refused(
        "its text_encoder is a DetrModel", hasty_config, f"generator.model={model}"
    )
    path.write_text(json.dumps(index))
    shutil.rmtree(model / "text_encoder")
    assert_generator_refused("has no folder text_encoder", hasty_config, f"generator.model={model}")


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_generator_weights_that_are_a_pickle_are_refused_in_our_words(model, part):
    """The attacker renames a pickle."""
    next((model / part).glob("*.safetensors")).write_bytes(pickled())
    config = load_settings(GeneratorConfig, {"model": str(model)})
    with pytest.raises(InputError, match=r"generator\.model = .*: cannot be loaded") as caught:
        load_generator(config, device="cpu")
    assert "weights_only" not in str(caught.value)


def test_low_rank_weights_that_are_a_pickle_are_refused_in_our_words(model, tmp_path):
    """The attacker renames a pickle."""
    (tmp_path / "lora.safetensors").write_bytes(pickled())
    lora = [{"path": str(tmp_path / "lora.safetensors")}]
    config = load_settings(GeneratorConfig, {"model": str(model), "lora": lora})
    with pytest.raises(InputError, match=r"generator\.lora = .*: cannot be added") as caught:
        load_generator(config, device="cpu")
    assert "weights_only" not in str(caught.value)
