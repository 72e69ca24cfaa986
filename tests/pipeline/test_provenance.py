"""Identity of models: which files make it up, cached digests, and roots of older versions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.formats import PLAN
from semix.data.lineage import describe_source, source
from semix.data.store import Store
from semix.pipeline.checks import notes
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.plan import BuildPlan
from semix.pipeline.provenance import (
    file_hashes,
    generator_identity,
    model_cards,
    model_identities,
)
from semix.pipeline.relabel import is_own
from semix.pipeline.root import _plan_record
from tests.pipeline.roots import altered, create_root

# Beside what is loaded: other formats, other precisions, a training's weights, a checker of images.
UNREAD = (
    "v1-5-pruned-emaonly.safetensors",
    "README.json",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin.index.json",
    "safety_checker/model.safetensors",
    "vae_1_0/config.json",
)


@pytest.fixture
def published(hasty_standins, tmp_path):
    """A model and a CLIP with all that a clone of a published repository has beside them."""
    model = Path(shutil.copytree(hasty_standins.diffusion, tmp_path / "sd"))
    clip = Path(shutil.copytree(hasty_standins.clip, tmp_path / "clip"))
    for path in (*(model / name for name in UNREAD), clip / "open_clip_pytorch_model.bin"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
    return model, clip


@pytest.fixture
def config(published, hasty_config):
    model, clip = published
    settings = (f"generator.model={model}", f"annotation.model=local-dir:{clip}")
    return altered(hasty_config, *settings)


def test_identity_is_of_what_would_be_loaded(config, hasty_standins):
    models = model_identities(config)
    files = models["generator"]["files"]
    assert not set(files) & set(UNREAD)
    weights = "diffusion_pytorch_model.safetensors"
    assert {"model_index.json", f"unet/{weights}", f"vae/{weights}"} < set(files)
    assert {"tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"} < set(files)
    assert set(models["annotation"]["files"]) == {
        "open_clip_config.json",
        "open_clip_model.safetensors",
    }
    alone = GeneratorConfig(model=str(hasty_standins.diffusion))
    assert generator_identity(alone)["files"] == files


def test_a_variant_is_hashed_where_a_part_has_it(published):
    model, _ = published
    files = generator_identity(GeneratorConfig(model=str(model), variant="fp16"))["files"]
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in files
    assert "unet/diffusion_pytorch_model.safetensors" not in files
    assert "text_encoder/model.fp16.safetensors" in files
    assert "vae/diffusion_pytorch_model.safetensors" in files


def test_shards_of_a_variant_come_with_their_index(tmp_path):
    names = (
        "model-00001-of-00001.fp16.safetensors",
        "model.fp16-00001-of-00001.safetensors",
        "model.safetensors.index.fp16.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
    )
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    assert set(file_hashes(tmp_path)) == set(names[3:])
    assert set(file_hashes(tmp_path, variant="fp16")) == {*names[:3], "config.json"}


def test_what_is_not_read_may_come_and_go(published, config, tmp_path):
    model, clip = published
    root = create_root(config, str(tmp_path / "mixed"))
    (clip / "open_clip_pytorch_model.bin").unlink()
    for name in UNREAD:
        (model / name).unlink()
    assert create_root(config, root.url).plan.digest == root.plan.digest


def test_a_model_card_is_recorded_and_changes_no_digest(published, config, tmp_path):
    model, clip = published
    earlier = create_root(config, str(tmp_path / "earlier"))
    (model / "README.md").write_text("---\nlicense: cc-by-nc-4.0\nbase_model: a/sd\n---\n")
    (clip / "README.md").write_text("---\nlicense: mit\n---\n")
    root = create_root(config, str(tmp_path / "mixed"))
    assert root.plan.digest == earlier.plan.digest
    expected = {"license": "cc-by-nc-4.0", "base_model": ["a/sd"]}
    assert root.plan.models["generator"]["card"] == expected
    assert root.plan.models["annotation"]["card"] == {"license": "mit"}
    with_card, without = source(root.plan), source(earlier.plan)
    assert with_card["models"] == without["models"]
    assert with_card["licences"] == {
        "generator": "cc-by-nc-4.0 (from a/sd)",
        "annotation": "mit",
    }
    assert without["licences"] == {"generator": "unknown", "annotation": "unknown"}
    assert "licences: generator cc-by-nc-4.0 (from a/sd), annotation mit" in describe_source(
        with_card
    )
    assert create_root(config, earlier.url).plan.digest == earlier.plan.digest
    warning = next(note for note in notes(config) if "licence" in note)
    assert "generator" in warning and "cc-by-nc-4.0, is not for commercial use" in warning


def test_the_card_of_a_lora_lies_beside_its_file(published, config):
    _, clip = published
    weights = clip / "open_clip_model.safetensors"  # any file; it is not loaded here
    (clip / "README.md").write_text("---\nlicense: other\nlicense_name: research-only\n---\n")
    with_lora = altered(config, f"generator.lora=[{{path: {weights}}}]")
    (lora,) = model_identities(with_lora)["generator"]["lora"]
    assert lora["card"] == {"license": "other", "license_name": "research-only"}
    assert model_cards(with_lora)["generator"]["lora"][0]["card"] == lora["card"]


def make_earlier_root(config, url: str):
    """A root as it was begun when everything in the folders was hashed."""
    models = model_identities(config)
    models["generator"]["files"] |= dict.fromkeys(UNREAD, "0" * 64)
    models["annotation"]["files"] |= {"tokenizer.json": "0" * 64, "old.bin": "0" * 64}
    Store(url).create(PLAN, _plan_record(BuildPlan(config, models=models)).written())
    Store(url).create("shards/0000/0000000.json", b"{}")  # else another plan takes its place
    return create_root(config, url)


def test_a_root_of_everything_in_the_folders_goes_on(config, tmp_path):
    root = make_earlier_root(config, str(tmp_path / "mixed"))
    assert is_own(root, config)  # so that relabelling reads no image anew


@pytest.mark.parametrize(
    "name", ["unet/config.json", "vae/diffusion_pytorch_model.safetensors", "model_index.json"]
)
def test_it_still_tells_what_changed(name, published, config, tmp_path):
    root = make_earlier_root(config, str(tmp_path / "mixed"))
    path = published[0] / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(
        InputError, match=r"generator\.model = .*: its files changed since the plan"
    ):
        create_root(config, root.url)


def test_a_tokenizer_file_that_is_gone_is_a_change(published, config, tmp_path):
    extra = published[0] / "tokenizer" / "special_tokens_map.json"
    extra.write_text("{}")
    root = make_earlier_root(config, str(tmp_path / "mixed"))
    extra.unlink()
    with pytest.raises(InputError, match="its files changed since the plan was made"):
        create_root(config, root.url)


HASHES = """
import json, sys
from pathlib import Path
from semix.pipeline.provenance import file_hashes
print(json.dumps(file_hashes(Path(sys.argv[1]))))
"""


@pytest.mark.process
def test_digests_are_remembered_by_size_and_time_of_change(tmp_path, monkeypatch):
    """What a process hashed, the next one need not read."""
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()

    def write_and_hash(content: bytes, *, second: int) -> str:
        weights.write_bytes(content)
        os.utime(weights, ns=(0, second * 10**9))
        command = [sys.executable, "-c", HASHES, str(weights.parent)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(result.stdout)[weights.name]

    first = write_and_hash(b"one", second=1)
    assert write_and_hash(b"two", second=1) == first  # the time is the same
    assert len({first, write_and_hash(b"two", second=2), write_and_hash(b"four", second=2)}) == 3
