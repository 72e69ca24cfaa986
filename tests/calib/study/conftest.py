"""Small studies."""

import copy
from collections.abc import Callable

import pytest

from calib.study import StudyConfig
from data.settings import load_settings
from tests.calib.study.studied import STUDY


@pytest.fixture
def make_study() -> Callable[..., StudyConfig]:
    """make_study(*overrides): one dataset and three methods, of which two share stage one."""

    def make(*overrides: str) -> StudyConfig:
        return load_settings(StudyConfig, copy.deepcopy(STUDY), overrides)

    return make
