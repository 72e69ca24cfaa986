"""The shape of the project: import arrows, lines of purpose, light start-up, the lock."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "pipeline", "calib", "flows")


def test_imports_go_down_only():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_every_module_says_in_one_line_what_it_is_for():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths.append(ROOT / "semix.py")
    for path in paths:
        if path.name == "__init__.py" and not path.read_text().strip():
            continue
        purpose = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        assert len(purpose) > 10, f"{path.relative_to(ROOT)} has no line of purpose"


@pytest.mark.process
def test_the_command_line_starts_without_heavy_imports():
    heavy = [
        "torch",
        "diffusers",
        "transformers",
        "open_clip",
        "prefect",
        "accelerate",
        "matplotlib",
        "sklearn",
    ]
    script = f"import sys, flows.cli; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_the_lock_pins_every_package_by_hash_and_names_no_host():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    packages = re.findall(r"^\S+==.*?(?=^\S|\Z)", lock, re.MULTILINE | re.DOTALL)
    assert len(packages) > 50
    assert all("--hash=sha256:" in package for package in packages)


@pytest.mark.process
def test_the_tests_choose_their_threads_before_torch_is_there():
    """A fork of a process whose OpenMP has threads waits for them for ever."""
    script = "import sys, tests.conftest; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr
