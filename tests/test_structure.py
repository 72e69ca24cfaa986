"""The shape of the project: import arrows, the README's tree, light start-up, the lock."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "pipeline", "calib", "flows")


def test_imports_go_down_only():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_readme_has_one_line_for_every_module():
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"```\n(data/\n.*?)```", readme, re.DOTALL)
    assert tree, "the README has no tree that starts with data/"
    listed, folders = [], []
    for line in tree[1].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name.rstrip("/")] if name.endswith("/") else []
        if not name.endswith("/"):
            listed.append("/".join([*folders, name]))
            assert len(line.split(maxsplit=1)) == 2, f"{name} has no purpose"
    there = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(listed) == sorted(there)


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


def test_the_tests_choose_their_threads_before_torch_is_there():
    """A fork of a process whose OpenMP has threads waits for them for ever."""
    script = "import sys, tests.conftest; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr
