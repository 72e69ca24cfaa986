"""Small models of a folder of pictures, by the command."""

import json
from pathlib import Path

import pytest
from PIL import Image

from semix.data.settings import load_settings
from semix.flows import standins
from semix.pipeline.config import BuildConfig
from semix.pipeline.root import create_root, plan_of
from semix.pipeline.standins import tiny_recipe
from tests.command import semix


@pytest.fixture
def pictures(tmp_path, digits):
    """Twenty digits each of two classes."""
    images, targets = digits.test.images(), digits.test.targets
    for digit, name in enumerate(("zero", "one")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number, image in enumerate(images[targets == digit][:20]):
            Image.fromarray(image).save(tmp_path / "pictures" / name / f"{number}.png")
    return tmp_path / "pictures"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(
        "semix.pipeline.standins.recipe_for", lambda **_: tiny_recipe(image_size=32)
    )


def test_a_folder_of_pictures_becomes_models_and_a_config_that_builds(pictures, tmp_path):
    (pictures / "zero" / "a.heic").write_bytes(b"")
    (pictures / "labels.csv").write_text("")
    status, out, err = semix("standins", str(pictures), "--out", str(tmp_path / "models"), "--json")
    assert status == 0, err
    assert "ignored beside 40 images: 1 .heic, 1 loose files; images are PNG," in err
    facts = json.loads(out)
    assert set(facts["seconds"]) == {"autoencoder", "denoiser", "CLIP"}
    assert 0 <= facts["generated"] <= 1 and facts["real"] == 1  # zeros and ones are easy
    plan = plan_of(
        create_root(load_settings(BuildConfig, facts["config"]), str(tmp_path / "mixed"))
    )
    assert plan.class_names == ("one", "zero")
    assert plan.config.generator.model == facts["diffusion"]
    assert plan.config.annotation.model == facts["clip"]
    assert plan.config.annotation.scale != "auto"
    assert "# Gives labels of" in Path(facts["config"]).read_text()


def test_again_it_finds_them_and_leaves_a_config_that_was_changed(pictures, tmp_path):
    models, config = tmp_path / "models", tmp_path / "build.yaml"
    config.write_text(f"real: {{name: imagefolder, path: {pictures}}}\nmixing: {{seed: 4}}\n")
    first = standins.standins(str(config), models)
    (models / "build.yaml").write_text("mine: true\n")
    status, out, err = semix("standins", str(pictures), "--out", str(models))
    assert status == 0, err
    assert "the models were trained already" in out
    assert "build.yaml exists and stays" in err
    assert (models / "build.yaml").read_text() == "mine: true\n"
    assert standins.standins(str(pictures), models)["clip"] == first["clip"]


def test_pictures_that_teach_nothing_are_refused_before_anything_is_trained(pictures, tmp_path):
    override = ("--set", "real.image_size=20")
    status, _, err = semix("standins", str(pictures), "--out", str(tmp_path / "models"), *override)
    assert status == 2
    assert "real.image_size = 20: choose a multiple of 8, at least 16" in err
    assert not (tmp_path / "models").exists()
