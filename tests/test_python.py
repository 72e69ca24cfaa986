"""`import semix`: its names, the modules that it loads; the code of docs/python.md runs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from PIL import Image

import semix
from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.settings import load_settings
from tests.calib.measured import make_run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [block for block in BLOCKS if "semix.train(" in block]
CLASSIFIER = [block for block in BLOCKS if "load_classifier" in block]
WORKERS = [block for block in BLOCKS if "num_workers=" in block]
TRAINING = {
    "name": "quick",
    "real": {"name": "digits", "image_size": 32, "train_per_class": 5, "validation_per_class": 5},
    "model": {"name": "resnet8", "width": 2},
    "epochs": 1,
    "batch_size": 25,
    "evaluation": {"bootstrap": 50},
}


def run(block: str, root: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(block.replace("/data/birds-mixed", root), names)
    return names


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate without state of earlier tests, and none left for later ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def birds(tmp_path, monkeypatch, hasty_config) -> None:
    """A working folder with the file that the page names."""
    monkeypatch.chdir(tmp_path)
    Path("birds.yaml").write_text(json.dumps(hasty_config.model_dump(mode="json")))


def test_the_lines_on_a_trained_run_are_run(birds, fresh_accelerate, capsys):
    config = load_settings(TrainConfig, {**TRAINING, "seeds": [0, 1]})
    train_run(claim_run(config, Path("runs", "csm")).parent)
    capsys.readouterr()
    Image.new("RGB", (40, 30), "white").save("photo.png")
    (block,) = CLASSIFIER
    names = run(block, "")
    first, _, probabilities = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("quick (base), mean of 2 seeds; calibrator ")
    assert probabilities.startswith("tensor([[")
    assert names["held"].shape == names["probabilities"].shape == (1, 10)


@pytest.mark.process
@pytest.mark.parametrize("block", WORKERS)
def test_the_pages_loaders_with_workers_give_every_image_once(block, built):
    assert run(block, built.url)["count"] == 180


@pytest.mark.parametrize("block", [b for b in BLOCKS if b not in COMMANDS + CLASSIFIER + WORKERS])
def test_the_pages_lines_run(block, birds, built, fresh_accelerate, capsys):
    for name, eces in (("ce", [0.05, 0.06, 0.07]), ("csm", [0.02, 0.03, 0.05])):
        make_run(Path("runs", name), name, [{"ece": ece} for ece in eces])
    names = run(block, built.url)
    if "error" in block:
        assert capsys.readouterr().out.startswith("mixing.alphas ")
    if "plan" in block:
        assert capsys.readouterr().out == "180 images in 8 shards; (0, 1) " + (
            f"{names['group'].alphas}\n"
        )
    if "count" in names:
        assert names["count"] == 180
    if "loader" in names:
        assert sum(len(batch["image"]) for batch in names["loader"]) == 180
    if "loss" in names:
        assert all(weight.grad.abs().sum() > 0 for weight in names["network"].parameters())
    if "change" in names:
        assert names["change"].mean() == pytest.approx(-0.08 / 3)
        assert names["low"] == pytest.approx(-0.03) and names["high"] == pytest.approx(-0.02)
    if "scaled" in names:
        assert names["scaled"].ece < names["plain"].ece


@pytest.mark.process
def test_the_pages_commands_run(birds, tmp_path):
    (commands,) = COMMANDS
    url = str(tmp_path / "mixed")
    Path("csm.yaml").write_text(json.dumps(TRAINING | {"mixed": {"url": url}}))
    names = run(commands, url)
    assert not names["root"].missing() and names["root"].url == url
    assert names["labels"]["done"] == 8
    assert names["measured"]["rows"][0]["bins"] == 20
    assert "quick" in Path("report.html").read_text()


def test_every_name_is_there_and_on_the_page():
    assert set(semix.__all__) == set(dir(semix)) == set(" ".join(semix._MODULES.values()).split())
    for name in semix.__all__:
        assert getattr(semix, name).__name__ == name
        assert f"`{name}`" in PAGE
        assert getattr(semix, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'bild'"):
        semix.bild  # noqa: B018


def test_no_package_imports_the_name_for_all():
    for package in ("data", "pipeline", "calib", "flows"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            assert not re.search(r"^ *(import semix$|from semix import)", text, re.MULTILINE), path


@pytest.mark.process
def test_importing_it_loads_nothing():
    script = "import sys, semix; dir(semix); print(sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    loaded = set(re.findall(r"'(.*?)'", ended.stdout))
    assert "semix" in loaded, ended.stderr
    heavy = {"torch", "prefect", "pydantic", "numpy", "rich", "typer"}
    assert not loaded & heavy
    assert {name for name in loaded if name.startswith("semix")} == {"semix"}
