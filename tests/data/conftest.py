"""A complete hand-made root, and copies of it that a test may damage."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from semix.data.root import Root
from tests.data.whole_roots import whole_root


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return whole_root(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def root(shared_root: Root, tmp_path: Path) -> Root:
    shutil.copytree(shared_root.url, tmp_path / "root")
    return Root(str(tmp_path / "root"))


@pytest.fixture
def in_a_container() -> Callable[..., str]:
    """in_a_container(code, *arguments): Python's output in a process-id namespace of its own."""
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--pid", "--fork"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no process numbers of its own may be had here")

    def run(code: str, *arguments: str) -> str:
        return subprocess.check_output(
            [*command, sys.executable, "-c", code, *arguments], text=True
        )

    return run
