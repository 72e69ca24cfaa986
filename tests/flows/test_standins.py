"""Small models of a folder of pictures, by the command."""

import json
from pathlib import Path

import pytest
from PIL import Image

from semix.data.settings import load_settings
from semix.flows import standins
from semix.pipeline.config import BuildConfig
from semix.pipeline.standins import tiny_recipe
from tests.command import semix
from tests.pipeline.roots import create_root, plan_of


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, digits):
    """Twenty digits each of two classes, and files that are none."""
    folder = tmp_path_factory.mktemp("standins") / "pictures"
    images, targets = digits.test.images(), digits.test.targets
    for digit, name in enumerate(("zero", "one")):
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(images[targets == digit][:20]):
            Image.fromarray(image).save(folder / name / f"{number}.png")
    (folder / "zero" / "a.heic").write_bytes(b"")
    (folder / "labels.csv").write_text("")
    return folder


@pytest.fixture(scope="module", autouse=True)
def hasty():
    """The command trains for a few steps."""
    recipe = tiny_recipe(image_size=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semix.pipeline.standins.recipe_for", lambda **_: recipe)
        yield


@pytest.fixture(scope="module")
def models(pictures):
    """Where the command puts the models of the pictures."""
    return pictures.with_name("models")


@pytest.fixture(scope="module")
def trained(pictures, models):
    """Status and output of the command that trained them."""
    return semix("standins", str(pictures), "--out", str(models), "--json")


def test_a_folder_of_pictures_becomes_models_and_a_config_that_builds(trained, tmp_path):
    status, out, err = trained
    assert status == 0, err
    assert "ignored beside 40 images: 1 .heic, 1 loose files; images are PNG," in err
    facts = json.loads(out)
    assert set(facts["seconds"]) == {"autoencoder", "denoiser", "CLIP"}
    assert set(facts["quality"]) == {"one", "zero"}
    for each in facts["quality"].values():
        assert 0 <= each["generated"] <= 1 and each["real"] == 1  # zeros and ones are easy
        assert 0 <= each["real_distance"] < each["distance"]  # after a few steps
    plan = plan_of(
        create_root(load_settings(BuildConfig, facts["config"]), str(tmp_path / "mixed"))
    )
    assert plan.class_names == ("one", "zero")
    assert plan.config.generator.model == facts["diffusion"]
    assert plan.config.annotation.model == facts["clip"]
    assert plan.config.annotation.scale != "auto"
    assert "# Gives labels of" in Path(facts["config"]).read_text()


def test_again_it_finds_them_and_leaves_a_config_that_was_changed(
    trained, models, pictures, tmp_path
):
    config = tmp_path / "build.yaml"
    config.write_text(f"real: {{name: imagefolder, path: {pictures}}}\nmixing: {{seed: 4}}\n")
    first = json.loads(trained[1])
    assert standins.standins(str(config), models)["diffusion"] == first["diffusion"]
    (models / "build.yaml").write_text("mine: true\n")
    status, out, err = semix("standins", str(pictures), "--out", str(models))
    assert status == 0, err
    assert "the models were trained already" in out
    assert "build.yaml exists and stays" in err
    assert (models / "build.yaml").read_text() == "mine: true\n"


def test_pictures_that_teach_nothing_are_refused_before_anything_is_trained(pictures, tmp_path):
    override = ("--set", "real.image_size=20")
    status, _, err = semix("standins", str(pictures), "--out", str(tmp_path / "models"), *override)
    assert status == 2
    assert "real.image_size = 20: choose a multiple of 8, at least 16" in err
    assert not (tmp_path / "models").exists()
