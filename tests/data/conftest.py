"""A hand-made root that has everything, and copies of it to damage."""

import shutil
from pathlib import Path

import pytest

from data.root import Root
from tests.data.whole_roots import whole_root


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return whole_root(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def root(whole: Root, tmp_path: Path) -> Root:
    shutil.copytree(whole.url, tmp_path / "root")
    return Root(str(tmp_path / "root"))
