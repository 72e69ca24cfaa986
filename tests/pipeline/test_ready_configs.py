"""Every file under configs/ can be read by its command."""

import pytest
import yaml

from semix.calib.check import check_config
from semix.calib.config import TrainConfig
from semix.calib.study import StudyConfig, cells_of, check_cells
from semix.configs import FOLDER as CONFIGS
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.flows.loop_config import LoopConfig
from semix.flows.study_builds import mixed_plans
from semix.pipeline.checks import check_generator
from semix.pipeline.config import BuildConfig
from tests.data.benchmark_files import writers

FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
FROM_HUB = {
    "cifar10-sd15.yaml",
    "imagefolder-sd21.yaml",
    "imagefolder-sdxl.yaml",
    "imagefolder-sdxl-turbo.yaml",
    "imagefolder-sd35-medium.yaml",
    "imagefolder-flux-dev.yaml",
    "imagefolder-flux2-klein.yaml",
    "imagefolder-z-image-turbo.yaml",
}
GREY = {"study-digits.yaml", "study-fashion.yaml"}  # with out-of-distribution images of the user
FASHION = {"study-fashion.yaml", "study-fashion-scarce.yaml", "study-fashion-resnet.yaml"}
STUDIES = [name for name in FILES if name.startswith("study-")]
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def kind_of(name):
    values = yaml.safe_load((CONFIGS / name).read_text())
    if "methods" in values:
        return StudyConfig
    if "build" in values:
        return LoopConfig
    return BuildConfig if "generator" in values else TrainConfig


@pytest.mark.parametrize("name", FILES)
def test_it_can_be_read(name):
    load_settings(kind_of(name), CONFIGS / name)


OWN = [name for name in FILES if name.startswith("train-imagefolder-")]


@pytest.mark.parametrize("name", OWN)
def test_a_training_of_own_pictures_passes_every_check(name, tmp_path):
    for label in ("jay", "owl"):
        (tmp_path / label).mkdir()
    config = load_settings(TrainConfig, CONFIGS / name, [f"real.path={tmp_path}"])
    check_config(config)
    assert name == f"train-imagefolder-{config.real.image_size}.yaml"
    assert config.augment.shift * 8 == config.real.image_size  # as its comment says


def test_there_is_a_training_config_for_each_size():
    assert [f"train-imagefolder-{size}.yaml" for size in (224, 32, 64)] == OWN


@pytest.fixture
def cifar(tmp_path):
    """The class folders of CIFAR-10, without images: all that the check of settings reads."""
    for split in ("train", "test"):
        for label in CIFAR:
            (tmp_path / split / label).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_of_a_study_can_be_trained_once_its_data_is_there(
    name, cifar, tmp_path, monkeypatch
):
    paths = [f"base.evaluation.ood.cifar10-grey.path={cifar}"] if name in GREY else []
    if name in FASHION:
        writers(monkeypatch)["FashionMNIST"](tmp_path)
        paths.append(f"base.real.path={tmp_path}")
    study = load_settings(StudyConfig, CONFIGS / name, paths)
    mixed_plans(study, cells_of(study))  # raises where a build is impossible
    for cell in cells_of(study):
        config = cell.config.model_copy(update={"mixed": None})
        if config.real.dataset == "CIFAR10" or config.real.name == "imagefolder":
            if config.real.name == "imagefolder":
                with pytest.raises(InputError, match=r"^real\.path = nothing: imagefolder needs"):
                    check_config(config)
            real = RealDataConfig(name="imagefolder", path=str(cifar))
            config = config.model_copy(update={"real": real})
        check_config(config)


def test_a_study_whose_mixed_images_are_not_named_says_so(cifar):
    real = f"datasets.cifar10.overrides.real={{name: imagefolder, path: {cifar}}}"
    study = load_settings(StudyConfig, CONFIGS / "study-cifar10-full.yaml", [real])
    with pytest.raises(InputError, match=r"^cifar10/csm: mixed\.url = : "):
        check_cells(cells_of(study))


@pytest.mark.parametrize("name", sorted(FROM_HUB))
def test_a_model_from_the_hub_is_pinned_or_says_that_it_must_be(name):
    text = (CONFIGS / name).read_text()
    config = load_settings(BuildConfig, CONFIGS / name).generator
    if config.revision is None:
        assert "revision: null  # pin the commit you reviewed" in text
        with pytest.raises(
            InputError, match=rf"revision = nothing: pin the commit of {config.model}"
        ):
            check_generator(config)
    else:
        check_generator(config)


def test_all_ready_files_are_looked_at():
    assert {*FROM_HUB, "imagenet-dit.yaml", "quickstart/build.yaml"} <= set(FILES)
    assert {"study-quickstart.yaml", "study-cifar10-full.yaml"} <= set(FILES)
