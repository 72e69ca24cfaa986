"""The wheel alone, outside the clone, in a folder whose files have our packages' names."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from semix.data.installation import DISTRIBUTION

CHECKOUT = Path(__file__).parents[2]
SOURCES = ("semix", "data", "pipeline", "calib", "flows", "configs")
TRAINING = {
    "name": "quick",
    "real": {"name": "digits", "image_size": 32, "train_per_class": 5, "validation_per_class": 5},
    "model": {"name": "resnet8", "width": 2},
    "epochs": 1,
    "batch_size": 25,
    "evaluation": {"bootstrap": 0},
    "trackers": [],
}
NOWHERE = "/dev/null/home"  # nobody can write there, root included


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that nothing is written beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, folder / "sources" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, folder / "sources")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, folder / "sources"], check=True)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, whose dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # The path alone: our own editable installation is not followed from there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    subprocess.run([*command, "--quiet", "--no-deps", "--no-index", wheel], check=True)
    return folder


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of the user's that have our folders' names, and fail when imported."""
    folder = tmp_path_factory.mktemp("users")
    for name in ("data.py", "flows.py", "calib.py", "pipeline/__init__.py", "configs.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('a file of the user was imported')\n")
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def variables(tmp_path: Path) -> Mapping[str, str]:
    """An account whose home cannot be written; the caches lie elsewhere."""
    inherited = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    caches = {"SEMIX_CACHE": str(tmp_path / "cache"), "PREFECT_HOME": str(tmp_path / "prefect")}
    return {**inherited, **caches, "HOME": NOWHERE, "MPLCONFIGDIR": str(tmp_path / "matplotlib")}


@pytest.fixture
def run(environment: Path, users: Path, variables: Mapping[str, str]) -> Iterator[Run]:
    """run(PROGRAM, *ARGUMENTS) in the user's folder; nothing is written to the installation."""
    package = next(environment.glob("lib/python*/site-packages/semix"))

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in package.rglob("*") if path.is_file()}

    def run_program(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [environment / "bin" / program, *arguments]
        return subprocess.run(
            command, cwd=users, env=dict(variables), capture_output=True, text=True, check=False
        )

    before = files()
    yield run_program
    assert {path: at for path, at in files().items() if path.suffix != ".pyc"} == {
        path: at for path, at in before.items() if path.suffix != ".pyc"
    }


def test_the_wheel_holds_one_package_with_all_that_it_reads(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"semix", f"{wheel.name[:-17]}.dist-info"}
    for folder in SOURCES:
        source = CHECKOUT / folder
        prefix = "semix/" if folder == "semix" else f"semix/{folder}/"
        expected = {
            prefix + path.relative_to(source).as_posix()
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert expected <= names
    assert "semix/py.typed" in names and "semix/configs/quickstart/csm.yaml" in names


def test_a_users_own_files_are_neither_imported_nor_in_the_way(run: Run):
    public = "import semix; [getattr(semix, name) for name in semix.__all__]; print(semix.__file__)"
    completed = run("python", "-c", public)
    assert completed.returncode == 0, completed.stderr
    assert "site-packages/semix/__init__.py" in completed.stdout


@pytest.mark.slow
def test_the_whole_way_from_a_config_to_a_report(run: Run, hasty_config, tmp_path: Path):
    build, train = tmp_path / "build.json", tmp_path / "train.json"
    build.write_text(hasty_config.model_dump_json())
    root, runs = str(tmp_path / "mixed"), str(tmp_path / "runs")
    train.write_text(json.dumps({**TRAINING, "mixed": {"url": root}}))
    for arguments in (
        ("doctor", str(build), "--out", root),
        ("build", str(build), "--out", root, "--slots", "1", "--device", "cpu"),
        ("train", str(train), "--out", runs, "--device", "cpu"),
        ("report", runs, "--out", str(tmp_path / "page.html")),
    ):
        completed = run("semix", *arguments)
        assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "quick" in (tmp_path / "page.html").read_text()


def test_the_quickstart_finds_its_settings(environment, users, variables, tmp_path: Path):
    """It is stopped once its first training has begun."""
    command = [environment / "bin" / "semix", "quickstart", "--out", tmp_path / "story"]
    with (tmp_path / "said").open("w") as log:
        child = subprocess.Popen(command, cwd=users, env=dict(variables), stdout=log, stderr=log)
        try:
            while not (tmp_path / "story" / "runs" / "ce" / "config.json").is_file():
                assert child.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.2)
        finally:
            child.send_signal(signal.SIGINT)
            child.wait()


def test_a_hint_names_the_wheel_that_is_installed(run: Run, wheel: Path):
    hint = "from semix.data.installation import install_command as c; print(c('export'))"
    assert run("python", "-c", hint).stdout == f"pip install '{wheel}[export]'\n"


def test_another_package_of_the_same_import_name_is_named(run: Run, environment: Path):
    site = next(environment.glob("lib/python*/site-packages"))
    other_package = site / "semix-0.1.2.dist-info"
    other_package.mkdir()
    (other_package / "METADATA").write_text("Metadata-Version: 2.1\nName: semix\nVersion: 0.1.2\n")
    try:
        completed = run("semix", "--help")
        assert completed.returncode == 1
        assert f"{other_package}: the distribution `semix` is another package" in completed.stderr
        assert f"`pip uninstall semix`, then install {DISTRIBUTION} again" in completed.stderr
    finally:
        shutil.rmtree(other_package)


def test_a_type_checker_sees_the_public_names(environment: Path, tmp_path: Path):
    """It reads our modules alone: torch would take it minutes."""
    script, settings = tmp_path / "typed.py", tmp_path / "mypy.ini"
    script.write_text("import semix\n\nreveal_type(semix.Root)\nsemix.build(3)\n")
    settings.write_text("[mypy]\nfollow_imports = skip\n[mypy-semix.*]\nfollow_imports = silent\n")
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--python-executable", python, script.name]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "def (url: " in output and "semix.data.root.Root" in output, output
    assert 'Argument 1 to "build" has incompatible type "int"' in output
