"""Every file under configs/ is what its command reads."""

from pathlib import Path

import pytest
import yaml

from calib.config import TrainConfig
from data.errors import InputError
from data.settings import load_settings
from pipeline.checks import check_generator
from pipeline.config import BuildConfig

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
FROM_HUB = {
    "cifar10-sd15.yaml",
    "imagefolder-sd21.yaml",
    "imagefolder-sdxl.yaml",
    "imagefolder-sdxl-turbo.yaml",
}


@pytest.mark.parametrize("name", FILES)
def test_it_can_be_read(name):
    values = yaml.safe_load((CONFIGS / name).read_text())
    kind = BuildConfig if "generator" in values else TrainConfig
    load_settings(kind, CONFIGS / name)


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


@pytest.mark.parametrize("name", [name for name in FILES if "/" not in name])
def test_it_says_what_it_needs(name):
    text = (CONFIGS / name).read_text()
    assert "# What it needs\n" in text
    assert all(f"#   {need}" in text for need in ("data", "model", "device"))
