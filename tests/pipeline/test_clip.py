"""open_clip models: which ones are refused, preprocessing and features as in open_clip."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import save_file

from semix.data.errors import InputError
from semix.pipeline.annotate import Encoders
from semix.pipeline.checks import check_clip
from semix.pipeline.clip import ClipEncoder, image_tower, preprocess, unsupported
from semix.pipeline.config import AnnotationConfig, EncoderConfig
from semix.pipeline.estimate import clip_cost
from semix.pipeline.generators.loading import module_bytes
from tests.pipeline import roots

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def pictures(*shape: int) -> np.ndarray:
    """Smooth colours with some edges, uint8 [2, H, W, 3]."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (2, 6, 6, 3), dtype=np.uint8)
    size = shape[::-1]
    large = [np.array(Image.fromarray(s).resize(size, Image.Resampling.BICUBIC)) for s in small]
    stacked = np.stack(large)
    stacked[:, : shape[0] // 3, : shape[1] // 3] = (255, 0, 128)
    return stacked


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(32, 32), (37, 31), (20, 20), (33, 64), (24, 24)])
@pytest.mark.parametrize("size", [24, (24, 24), (24, 18)])
def test_images_reach_the_model_as_open_clip_would_give_them(mode, interpolation, shape, size):
    settings = {
        "size": size,
        "mean": MEAN,
        "std": STD,
        "interpolation": interpolation,
        "resize_mode": mode,
        "fill_color": 7,
        "mode": "RGB",
    }
    if mode == "shortest" and size == (24, 18) and interpolation == "bilinear":
        settings["interpolation"] = "bicubic"  # open_clip itself ignores bilinear there
    transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)
    images = pictures(*shape)
    expected = torch.stack([transform(Image.fromarray(image)) for image in images])
    actual = preprocess(torch.from_numpy(images).permute(0, 3, 1, 2), settings)
    assert actual.shape == expected.shape
    # In steps of 255: PIL rounds its filters' weights, which moves a few values by one or two.
    steps = (actual - expected).abs() * 255 * torch.tensor(STD).view(3, 1, 1)
    assert steps.max() < 2.1
    assert steps.mean() < 0.05


def test_unknown_preprocessing_is_named():
    assert unsupported({"interpolation": "nearest"}) == "interpolation 'nearest'"
    assert unsupported({"resize_mode": "pad", "interpolation": "bicubic"}) == "resize_mode 'pad'"
    assert unsupported({"interpolation": "random", "resize_mode": "longest"}) is None


def local(folder: Path) -> EncoderConfig:
    return EncoderConfig(model=f"local-dir:{folder}")


def test_a_model_with_other_preprocessing_is_refused(clip):
    settings = json.loads((clip / "open_clip_config.json").read_text())
    settings["preprocess_cfg"]["resize_mode"] = "tile"
    (clip / "open_clip_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"annotation\.model = .*: its preprocessing is unknown"):
        ClipEncoder(local(clip), device="cpu")


def test_features_are_those_of_open_clip(clip):
    images = pictures(32, 32)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{clip}")
    with torch.inference_mode():
        expected = model.eval().encode_image(
            torch.stack([transform(Image.fromarray(image)) for image in images])
        )
    actual = ClipEncoder(local(clip), device="cpu").encode(torch.from_numpy(images))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_another_precision_is_that_of_the_network_and_not_of_its_features(clip):
    images = torch.from_numpy(pictures(32, 32))
    twin = local(shutil.copytree(clip, clip.with_name("twin")))
    config = AnnotationConfig(model=f"local-dir:{clip}", dtype="bfloat16", second=twin)
    encoded = Encoders(config, device="cpu").encode(images)
    assert list(encoded) == ["features", "second"]
    exact = ClipEncoder(local(clip), device="cpu").encode(images)
    for features in encoded.values():
        assert features.dtype == torch.float32
        assert torch.equal(features.bfloat16().float(), features)
        assert 0 < (features - exact).norm() < 0.05 * exact.norm()


def test_float16_is_refused_without_a_gpu(clip):
    with pytest.raises(InputError, match=r"annotation\.dtype = float16: needs a GPU"):
        ClipEncoder(local(clip), device="cpu", dtype="float16")


def test_many_images_are_encoded_in_bounded_batches(clip, monkeypatch):
    monkeypatch.setattr("semix.pipeline.clip.BATCH", 3)
    encoder, sizes = ClipEncoder(local(clip), device="cpu"), []
    encode = encoder.model.encode_image
    monkeypatch.setattr(
        encoder.model, "encode_image", lambda pixels: (sizes.append(len(pixels)), encode(pixels))[1]
    )
    images = torch.from_numpy(np.concatenate([pictures(32, 32)] * 4))
    assert encoder.encode(images).shape[0] == 8
    assert sizes == [3, 3, 2]


@pytest.mark.parametrize("model", ["/models/clip", "./clip", "owner/clip"])
def test_a_path_or_a_hub_id_is_told_how_to_be_written(model):
    text = rf"^annotation\.model = {model}: write local-dir:{model} if it is a folder, hf-hub:"
    with pytest.raises(InputError, match=text):
        check_clip(AnnotationConfig(model=model))


def test_weights_that_are_not_there_are_not_random(clip):
    (clip / "open_clip_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"annotation\.model = .*clip: holds no weights"):
        check_clip(AnnotationConfig(model=f"local-dir:{clip}"))
    with pytest.raises(InputError, match=r"annotation\.model = .*clip: holds no weights"):
        ClipEncoder(local(clip), device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "hf-hub:owner/name"}, r"annotation\.revision = nothing: pin the commit of hf-"),
        (
            {"model": "hf-hub:owner/name", "revision": "main"},
            r"annotation\.revision = main: pin the commit of hf-hub:owner/name that you reviewed",
        ),
        (
            {"model": "ViT-B-32", "pretrained": "openai", "revision": COMMIT},
            r"annotation\.revision = 0123\w+: belongs to hf-hub: models, and ViT-B-32 is none",
        ),
        (
            {"model": "hf-hub:owner/name", "revision": COMMIT, "pretrained": "openai"},
            r"annotation\.pretrained = openai: hf-hub:owner/name brings its own weights; leave it",
        ),
        (
            {"model": "ViT-B-32", "pretrained": "opnai"},
            r"annotation\.pretrained = opnai: is no file, and no tag of ViT-B-32; it has openai, ",
        ),
    ],
)
def test_models_that_cannot_be_pinned_or_found_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        check_clip(AnnotationConfig(**settings))


def test_a_pinned_hub_model_is_taken(hasty_standins):
    check_clip(AnnotationConfig(model="hf-hub:owner/name", revision=COMMIT))


HUB = """
import sys
import numpy as np, torch
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.config import EncoderConfig
from tests.handmade import committed

images = torch.from_numpy(np.load(sys.argv[1]))
for source in ({"model": sys.argv[2]}, {"model": "hf-hub:owner/name", "revision": sys.argv[3]}):
    print(ClipEncoder(EncoderConfig(**source), device="cpu").encode(images).sum(0).tolist())
"""


@pytest.mark.process
def test_the_pinned_commit_is_what_is_loaded(hasty_standins, tmp_path):
    """Offline, from a cache that holds two commits, of which `main` names the other one."""
    cached = tmp_path / "hub" / "models--owner--name"
    for commit in (COMMIT, "f" * 40):
        shutil.copytree(hasty_standins.clip, cached / "snapshots" / commit)
    (cached / "snapshots" / ("f" * 40) / "open_clip_model.safetensors").unlink()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("f" * 40)
    np.save(tmp_path / "images.npy", pictures(32, 32))
    script = tmp_path / "hub.py"
    script.write_text(HUB)
    environment = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, script, tmp_path / "images.npy"]
    result = subprocess.run(
        [*command, f"local-dir:{hasty_standins.clip}", COMMIT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    one, other = result.stdout.splitlines()
    assert one == other


@pytest.fixture
def coca(clip):
    """A small CoCa in the place of a small CLIP: its image tower gives tokens, too."""
    settings = json.loads((clip / "open_clip_config.json").read_text())
    networks = settings["model_cfg"]
    shape = {"width": 16, "heads": 2, "layers": 1, "vocab_size": 64}
    networks["vision_cfg"] |= {
        "attentional_pool": True,
        "attn_pooler_heads": 2,
        "output_tokens": True,
    }
    networks["text_cfg"] = shape | {"context_length": 8, "embed_cls": True, "output_tokens": True}
    networks["multimodal_cfg"] = shape | {"context_length": 8, "attn_pooler_heads": 2}
    networks["custom_text"] = True
    torch.manual_seed(0)
    arguments = {name: value for name, value in networks.items() if name != "custom_text"}
    model = open_clip.coca_model.CoCa(**arguments)
    save_file(model.state_dict(), clip / "open_clip_model.safetensors")
    (clip / "open_clip_config.json").write_text(json.dumps(settings))
    return clip


def test_a_coca_makes_a_dataset(coca, hasty_config, tmp_path):
    """From the check of the models to the stored features."""
    config = roots.altered(hasty_config, f"annotation.model=local-dir:{coca}")
    root = roots.made(config, tmp_path / "mixed", "--shards", "0")
    stored, (_, width) = roots.features(root, 0)["features"], clip_cost(config.annotation)
    assert stored.shape[-1] == width


def test_features_of_a_coca_have_length_one_as_open_clip_gives_them(coca):
    images = pictures(32, 32)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{coca}")
    pixels = torch.stack([transform(Image.fromarray(image)) for image in images])
    with torch.inference_mode():
        expected = model.eval().encode_image(pixels)
    actual = ClipEncoder(local(coca), device="cpu").encode(torch.from_numpy(images))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("kind", ["clip", "coca"])
def test_the_image_tower_alone_stays_and_it_alone_is_counted(kind, request):
    config = local(request.getfixturevalue(kind))
    encoder = ClipEncoder(config, device="cpu")
    tower_bytes = module_bytes(image_tower(config, "annotation"))
    assert module_bytes(encoder.model) == tower_bytes > 0
