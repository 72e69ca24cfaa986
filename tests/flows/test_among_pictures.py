"""Nothing is written into a folder of real images, where a new folder would become a class."""

import json
import os
from pathlib import Path

import pytest
import yaml
from PIL import Image

from semix.data.formats import PLAN
from semix.data.imagefolder import check_outside_images
from semix.pipeline.config import BuildConfig
from tests.command import semix

OUTSIDE = "the folder of your pictures, which it would change (a folder there is a class); choose"


@pytest.fixture
def pictures(tmp_path: Path, digits) -> Path:
    """Twenty digits each of two classes."""
    folder, images = tmp_path / "pictures", digits.test.images()
    for digit, name in enumerate(("zero", "one")):
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(images[digits.test.targets == digit][:20]):
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_yaml(path: Path, values: dict) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.fixture
def configs(pictures: Path, hasty_config: BuildConfig, tmp_path: Path) -> dict[str, str]:
    """Per command a config file whose real images are the pictures."""
    real = {"name": "imagefolder", "path": str(pictures)}
    build = hasty_config.model_dump(mode="json", exclude_defaults=True) | {"real": real}
    train = {"real": real, "model": {"name": "lenet"}, "epochs": 1}
    rows = {"baseline": "CE", "datasets": {"mine": {}}, "methods": {"CE": {}}}
    study = {"name": "mine", "base": train, **rows}
    values = {
        "build": build,
        "train": {"name": "ce"} | train,
        "study": study,
        "standins": {"real": real},
    }
    return {name: write_yaml(tmp_path / f"{name}.yaml", v) for name, v in values.items()}


@pytest.mark.parametrize("command", ["build", "build --check", "train", "study", "standins"])
@pytest.mark.parametrize("below", ["mixed", "zero/mixed", "."])
def test_a_place_in_the_folder_is_refused_and_nothing_changes(pictures, configs, command, below):
    before = files(pictures)
    name, *options = command.split()
    status, _, err = semix(name, configs[name], "--out", str(pictures / below), *options)
    assert status == 2
    assert f"out = {pictures / below}".removesuffix("/.") in err
    assert OUTSIDE in err and files(pictures) == before


def test_the_place_beside_the_folder_and_the_folder_below_the_place_are_fine(pictures):
    check_outside_images(str(pictures), pictures.parent / "mixed")
    check_outside_images(str(pictures), f"{pictures}-mixed")
    check_outside_images(str(pictures), pictures / ".." / "mixed")
    check_outside_images(str(pictures), pictures.parent)
    check_outside_images(None, pictures / "mixed")


@pytest.mark.parametrize(
    "place", ["link/mixed", "within/mixed", "pictures/away/mixed", "far/mixed"]
)
def test_links_lead_to_the_folder_out_of_it_and_to_its_classes(pictures, tmp_path, place):
    (tmp_path / "link").symlink_to(pictures)
    (tmp_path / "within").symlink_to(pictures / "zero")
    (tmp_path / "far").mkdir()
    (pictures / "away").symlink_to(tmp_path / "far")
    path, folder = tmp_path / place, os.path.relpath(tmp_path / "link")
    with pytest.raises(Exception, match="choose a place outside of it"):
        check_outside_images(folder, path)


def test_images_are_neither_exported_nor_baked_into_it(root, pictures):
    """A root says where its real images lay."""
    plan = json.loads(root.store.get(PLAN))
    plan["config"]["real"] |= {"name": "imagefolder", "path": str(pictures)}
    root.store.put(PLAN, json.dumps(plan).encode())
    before = files(pictures)
    status, _, err = semix("export", root.url, "--to", str(pictures / "folder"))
    assert status == 2 and f"--to = {pictures / 'folder'}: lies in {pictures}" in err
    ratio = ("--set", "annotation.rule=mixing_ratio")
    status, _, err = semix("relabel", root.url, *ratio, "--out", str(pictures / "baked"))
    assert status == 2 and f"out = {pictures / 'baked'}: lies in {pictures}" in err
    assert files(pictures) == before
