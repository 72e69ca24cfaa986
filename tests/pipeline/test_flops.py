"""FLOP counts from configs alone, against published numbers and against the loaded models."""

import json
from pathlib import Path

import pytest
import torch
from open_clip import create_model

from pipeline.clip import ClipEncoder
from pipeline.config import AnnotationConfig, ApproximationConfig, BuildConfig, GeneratorConfig
from pipeline.costs.flops import clip_flops, decode_flops, flops, model_costs, row_flops
from pipeline.costs.skeletons import Uncounted
from pipeline.generators import load_generator
from pipeline.rows import count_rows

GIGA = 1e9
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
# The published configs; what they leave out are the classes' defaults.
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SD21 = {
    "sample_size": 64,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
SDXL = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
DIT_XL_2 = {
    "sample_size": 32,
    "num_layers": 28,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def configs_of(folder: Path, part: str, network: dict) -> str:
    """A model directory with the configs that a hub repository has, and no weights."""
    kinds = {"unet": "UNet2DConditionModel", "transformer": "DiTTransformer2DModel"}
    index = {part: ["diffusers", kinds[part]], "vae": ["diffusers", "AutoencoderKL"]}
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    write(folder / part / "config.json", {"_class_name": kinds[part], **network})
    write(folder / "vae" / "config.json", VAE)
    write(folder / "tokenizer" / "tokenizer_config.json", {"model_max_length": 77})
    return str(folder)


@pytest.mark.process  # for its length
@pytest.mark.parametrize(
    ("family", "part", "network", "row", "decode"),
    [
        # The U-Net of SD 1.5 without its attention products is the 338.76 GMAC that DeepCache
        # and T-GATE print; that of SDXL without them is 5.98 TFLOP in diffusers' benchmark.
        ("stable_diffusion", "unet", SD15, 803.3, 2_515),
        ("stable_diffusion", "unet", SD21, 804.3, 2_515),
        ("sdxl", "unet", SDXL, 6_761, 10_470),
        # 118.6 GMAC in table 4 of Peebles and Xie 2023.
        ("dit", "transformer", DIT_XL_2, 2 * 118.6, 622),
    ],
)
def test_published_networks(tmp_path, family, part, network, row, decode):
    config = GeneratorConfig(family=family, model=configs_of(tmp_path, part, network))
    assert row_flops(config) / GIGA == pytest.approx(row, rel=2e-3)
    assert decode_flops(config) / GIGA == pytest.approx(decode, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "published"), [("ViT-B-32-quickgelu", 8.82), ("ViT-L-14", 162.0), ("ViT-H-14", 334.6)]
)
def test_published_clip_towers(name, published):
    config = AnnotationConfig(model=name, pretrained="openai")
    assert clip_flops(config) / GIGA == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "fixture"),
    [
        ("stable_diffusion", "tiny_sd_epsilon"),
        ("sdxl", "tiny_sdxl"),
        ("dit", "tiny_dit"),
    ],
)
def test_the_loaded_model_computes_as_much(family, fixture, request, tiny_names):
    config = GeneratorConfig(family=family, model=str(request.getfixturevalue(fixture)))
    generator = load_generator(config, device="cpu")
    condition = generator.encode(tiny_names[:1])
    latents = torch.randn(1, *generator.latent_shape)
    counted, _ = flops(lambda: generator.denoiser(latents, torch.tensor(500), condition))
    assert row_flops(config) == counted
    assert decode_flops(config) == flops(lambda: generator.decode(latents))[0]


def test_the_loaded_clip_computes_as_much(hasty_config):
    config = hasty_config.annotation
    encoder = ClipEncoder(config, device="cpu")
    pixels = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
    torch.backends.mha.set_fastpath_enabled(False)  # a kernel that no count sees into
    try:
        assert clip_flops(config) == flops(lambda: encoder.encode(pixels))[0]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_whole_text_and_image_model_gives_the_same(hasty_config):
    """The tower alone is built; open_clip's own factory builds all of it."""
    model = create_model("RN50", load_weights=False).eval()
    size = model.visual.image_size
    counted, _ = flops(lambda: model.encode_image(torch.randn(1, 3, size, size)))
    assert clip_flops(AnnotationConfig(model="RN50", pretrained="openai")) == counted


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_sampling_with_a_cache_computes_as_much(tiny_sd, tiny_names, guidance_scale):
    approximate = ApproximationConfig(cache_steps=2)
    config = GeneratorConfig(
        model=str(tiny_sd), steps=5, guidance_scale=guidance_scale, approximate=approximate
    )
    costs, rows = costs_with(config), count_rows(config, 1)
    assert rows.shallow > 0 < costs.shallow_row < costs.row
    generator = load_generator(config, device="cpu")
    noise = torch.randn(1, *generator.latent_shape)
    counted, _ = flops(lambda: generator.sample(noise, generator.encode(tiny_names[:1])))
    text, _ = flops(lambda: generator.encode(tiny_names[:1]))
    assert counted - text == rows.full * costs.row + rows.shallow * costs.shallow_row


def test_rows_are_only_shallow_where_a_cache_is_on(tiny_sd):
    assert costs_with(GeneratorConfig(model=str(tiny_sd))).shallow_row == 0


def costs_with(generator: GeneratorConfig):
    values = {
        "real": {"name": "digits"},
        "generator": generator.model_dump(),
        "mixing": {"groups_per_pair": 1},
        "annotation": {"model": "ViT-B-32-quickgelu", "pretrained": "openai"},
    }
    return model_costs(BuildConfig.model_validate(values))


def test_what_the_networks_give(tmp_path):
    found = costs_with(GeneratorConfig(model=configs_of(tmp_path, "unet", SD15)))
    assert (found.image_size, found.feature_width) == (512, 512)


def test_models_that_are_not_here_are_not_counted(tmp_path):
    message = r"^generator\.model = owner/model: is not on this machine; what it costs can be told"
    with pytest.raises(Uncounted, match=message):
        row_flops(GeneratorConfig(model="owner/model", revision="0" * 40))
    with pytest.raises(Uncounted, match=r"^generator\.model = .+/gone: is not on this machine"):
        row_flops(GeneratorConfig(model=str(tmp_path / "gone")))
    for name in ("hf-hub:owner/clip", f"local-dir:{tmp_path / 'gone'}"):
        with pytest.raises(Uncounted, match=r"^annotation\.model = .+: is not on this machine"):
            clip_flops(AnnotationConfig(model=name))
