"""The shape of the project: import arrows, lines of purpose, light start-up, the lock."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import semix
from semix.data.installation import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "pipeline", "calib", "flows")
HEAVY = [
    "torch",
    "diffusers",
    "transformers",
    "open_clip",
    "prefect",
    "accelerate",
    "matplotlib",
    "sklearn",
]


# Our packages that each package may import; only flows knows the orchestrator.
ARROWS = {
    "data": {"data"},
    "pipeline": {"pipeline", "data"},
    "calib": {"calib", "data"},
    "flows": {"flows", "pipeline", "calib", "data", "configs", "prefect"},
}


def imported(path: Path) -> set[str]:
    """Names of the modules that a file imports, with late imports and those for types."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def test_imports_go_down_only():
    for package, allowed in ARROWS.items():
        for path in sorted((ROOT / package).rglob("*.py")):
            for module in imported(path):
                top, _, below_top = module.partition(".")
                target = below_top.partition(".")[0] if top == "semix" else top.split("_")[0]
                is_checked = top == "semix" or target == "prefect"
                assert not is_checked or target in allowed, f"{path.relative_to(ROOT)}: {module}"


def test_benchmarks_import_names_that_are_there():
    """Most of them run by hand only, so a name that was moved would be missed."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for name in imported(path):
            module, _, attribute = name.rpartition(".")
            if not module.startswith(("benchmarks", "tests")):
                continue
            folder = ROOT / module.replace(".", "/")
            files = [f for f in (folder.with_suffix(".py"), folder / "__init__.py") if f.exists()]
            is_there = any(attribute in file.read_text() for file in files)
            is_there |= (folder / attribute).is_dir() or (folder / f"{attribute}.py").exists()
            assert is_there, f"{path.relative_to(ROOT)}: {name}"


def test_every_folder_with_code_is_a_package_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    names = {".".join(("semix", *folder.relative_to(ROOT).parts)) for folder in folders}
    declared = set(project["tool"]["setuptools"]["packages"])
    assert declared == {"semix", "semix.configs", *names}


def test_modules_of_public_names_are_typed_throughout():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (strict,) = project["tool"]["mypy"]["overrides"]
    assert strict["disallow_any_generics"] and strict["warn_return_any"]
    assert set(strict["module"]) == {"semix", *semix._MODULES}


def test_every_hint_installs_this_distribution():
    """PyPI's `semix` is another package."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    foreign = re.compile(
        r"(?:pip|uv|pipx) (?:install|add)\b[^\n]*[\s'\"]semix(?=[\[\s'\"`]|$)", re.M
    )
    files = [path for name in (*PACKAGES, "docs", "docker") for path in (ROOT / name).rglob("*.*")]
    for path in (*files, *ROOT.glob("*.md"), ROOT / "docker" / "Dockerfile"):
        if path.suffix in {".py", ".md", ".yaml", ".env", ""}:
            assert not foreign.search(path.read_text()), path


def test_every_module_says_in_one_line_what_it_is_for():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths.append(ROOT / "semix" / "__init__.py")
    for path in paths:
        if path.name == "__init__.py" and not path.read_text().strip():
            continue
        purpose = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        assert len(purpose) > 10, f"{path.relative_to(ROOT)} has no line of purpose"


@pytest.mark.process
def test_the_command_line_starts_without_heavy_imports():
    script = f"import sys, semix.flows.cli; print([m for m in {HEAVY} if m in sys.modules])"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.stdout.strip() == "[]", completed.stderr


MISTAKES = {
    "train {ce} --out {run} --set loss.name=cee": "loss.name = cee: did you mean ce? ",
    "train {ce} --out {run} --set loss.name=focal --set loss.gama=3": "loss.gama: unknown setting",
    "train {ce} --out {run} --set model.name=resnet": "model.name = resnet: did you mean resnet8?",
    "train {ce} --out {run} --set model.widht=2": "model.widht: unknown setting",
    "train {ce} --out {run} --set method.name=mixin": "method.name = mixin: choose one of plain",
    "train {ce} --out {run} --set head.loss.name=cee": "head.loss.name = cee: did you mean ce? ",
    "train {ce} --out {run} --set mixed.url={run}": "mixed.url = {run}: there is no such folder",
    "train {ce} --out {run} --set mixed.url={run} --set mixed.loss=l1": "mixed.loss = 'l1': choose",
    "train {ce} --out {run} --set trackers=[wandb]": "trackers = wandb: is not installed",
    "train {ce} --out {run} --processes 3": "batch_size = 128: 3 processes share it equally",
    "train {ce} --out {ce}/run": "out = {ce}/run: cannot be written (Not a directory)",
    "study {study} --out {run}": "digits/soft: loss.name = soft: choose one of ce, ls,",
    "study {valid} --out {ce}/x --only */ce": "out = {ce}/x: cannot be written (Not a directory)",
    "evaluate {run}": "run = {run}: there is no such folder",
    "evaluate {empty}": "run = {empty}: holds no config.json",
    "evaluate {begun}": "run = {begun}: seed 0 is not trained; finish it with `semix train",
    "report {run}": "run = {run}: there is no such folder",
    "report {begun}": "run = {begun}: seed 0 is not trained; finish it with `semix train",
    "report {begun} --out {ce}/page": "--out = {ce}/page: cannot be written (Not a directory)",
    "build {ce} --out {run}": "config = {ce}: is a training config: semix train {ce} --out",
    "config train evaluation.bin": "KEY = evaluation.bin: no setting of a train config; did you",
    "relabel {run} --set annotation.scale=2": "url = {run}: there is no such folder",
}


@pytest.mark.process
def test_a_mistake_is_named_before_torch_or_prefect_is_imported(tmp_path):
    """Commands run in a new process, since this one has imported both."""
    ce = {"name": "CE", "real": {"name": "digits"}, "model": {"name": "lenet"}}
    base = {key: ce[key] for key in ("real", "model")}
    methods = {"ce": {}, "soft": {"overrides": {"loss": {"name": "soft"}}}}
    study = {"name": "S", "base": base, "datasets": {"digits": {}}, "methods": methods}
    paths = {name: tmp_path / name for name in ("ce", "study", "valid", "run", "begun", "empty")}
    paths["ce"].write_text(json.dumps(ce))
    paths["study"].write_text(json.dumps(study | {"baseline": "ce"}))
    paths["valid"].write_text(json.dumps(study | {"baseline": "ce", "methods": {"ce": {}}}))
    paths["begun"].mkdir()
    paths["empty"].mkdir()
    (paths["begun"] / "config.json").write_text(json.dumps(ce))
    commands = [command.format(**paths).split(" ") for command in MISTAKES]
    script = f"""
import json, os, sys
from tests.command import semix
found = []
for command in json.loads(sys.argv[1]):
    status, _, said = semix(*command)
    found.append([status, said, [m for m in {HEAVY} if m in sys.modules]])
print(json.dumps(found))
"""
    command = [sys.executable, "-c", script, json.dumps(commands)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    results = json.loads(completed.stdout)
    for text, (status, err, imported) in zip(MISTAKES.values(), results, strict=True):
        assert err.startswith(f"error: {text.format(**paths)}")
        assert (status, imported, err.count("\n")) == (2, [], 1), err
    assert not paths["run"].exists()


def test_the_lock_pins_every_package_by_hash_and_names_no_host():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    packages = re.findall(r"^\S+==.*?(?=^\S|\Z)", lock, re.MULTILINE | re.DOTALL)
    assert len(packages) > 50
    assert all("--hash=sha256:" in package for package in packages)


@pytest.mark.process
def test_the_tests_choose_their_threads_before_torch_is_there():
    """A forked process hangs if its parent's OpenMP already had threads."""
    script = "import sys, tests.conftest; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.strip() == "False", ended.stderr
