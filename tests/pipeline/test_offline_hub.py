"""A model of a hub that cannot be reached: one line, with what to do before."""

import huggingface_hub.constants
import pytest

from semix.data.errors import InputError
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.config import EncoderConfig, GeneratorConfig
from semix.pipeline.generators.loading import load_pipeline

COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


def generator() -> None:
    load_pipeline(GeneratorConfig(model="nobody/nothing", revision=COMMIT), device="cpu")


def unet() -> None:
    config = GeneratorConfig(
        model="nobody/nothing", revision=COMMIT, unet="nobody/unet", unet_revision=COMMIT
    )
    load_pipeline(config, device="cpu")


def encoder() -> None:
    ClipEncoder(EncoderConfig(model="hf-hub:nobody/clip", revision=COMMIT), device="cpu")


@pytest.mark.parametrize(
    ("load", "field", "model"),
    [
        (generator, "generator.model", "nobody/nothing"),
        (unet, "generator.unet", "nobody/unet"),
        (encoder, "annotation.model", "hf-hub:nobody/clip"),
    ],
)
def test_a_model_that_cannot_be_fetched_says_how_to_fetch_it_before(load, field, model):
    with pytest.raises(InputError) as caught:
        load()
    assert (caught.value.field, caught.value.value) == (field, model)
    name = model.removeprefix("hf-hub:")
    assert caught.value.remedy == (
        "is not on this machine, and the hub cannot be reached from it; fetch it before with "
        f"`hf download {name} --revision COMMIT`, or give the path of a copy"
    )
