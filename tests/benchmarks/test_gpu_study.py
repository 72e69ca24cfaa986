"""The whole study of one GPU in its tiny form, on a CPU: stopped by its budget, then continued."""

import json
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from PIL import Image

from benchmarks.gpu.study import UNFINISHED, main
from semix.data.root import Root
from tests.data.benchmark_files import writers

ROOT = Path(__file__).parents[2]
CLASSES = ("zero", "one", "two", "three")

pytestmark = pytest.mark.process


@pytest.fixture
def pictures(digits, tmp_path) -> Path:
    """A folder of train/CLASS and test/CLASS."""
    for split, name in (("train", "train"), ("train", "validation"), ("test", "test")):
        real = getattr(digits, name)
        for target, label in enumerate(CLASSES):
            folder = tmp_path / "pictures" / split / label
            folder.mkdir(parents=True, exist_ok=True)
            indices = (real.targets == target).nonzero()[0][:30]
            for index, pixels in zip(indices, real.images(indices), strict=True):
                Image.fromarray(pixels).save(folder / f"{name}-{index}.png")
    return tmp_path / "pictures"


@pytest.mark.slow
def test_it_stops_with_its_budget_goes_on_and_writes_every_value(pictures, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.gpu", "study", "--size", "tiny", "--slots", "2"]
    command += ["--device", "cpu", "--images", str(pictures), "--out", str(out)]

    def run(budget: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--budget", budget], cwd=ROOT, capture_output=True, text=True
        )

    stopped = run("8s")
    assert stopped.returncode == 75, stopped.stderr
    assert "0 of 1 mixed datasets are made, 0 of 8 cells measured" in stopped.stdout
    assert not (out / "result.json").exists()
    finished = run("9m")
    assert finished.returncode == 0, finished.stderr
    assert "prefect" not in finished.stderr
    (root,) = [Root(str(path.parent)) for path in out.glob("mixed/*/plan.json")]
    assert root.missing() == [] and len(root.done()) == 1
    result = json.loads((out / "result.json").read_text())
    assert (result["device"], result["config"]["name"]) == ("cpu", "CIFAR-10 on one GPU")
    study_values = result["results"]["study"]["figures"]
    assert study_values["missing"] == {}
    assert set(study_values["seconds"]) == {"models and mixed images", "trainings"}
    values = pandas.DataFrame(study_values["values"]).query("kind == 'plain'")
    points = [f"CSM (w {w})" for w in (1, 2, 4)]
    rows = ["CE", "LS", "FeDLaS-MbLS", *points, "CSM, chosen", "head without masks", "CE + MaC-Cal"]
    assert list(values["row"]) == rows
    assert values[["accuracy", "ece", "nll", "shift_ece"]].notna().all(axis=None)


def test_it_takes_a_benchmark_by_name(tmp_path, monkeypatch, capsys):
    writers(monkeypatch)["FashionMNIST"](tmp_path)
    options = ["--images", str(tmp_path), "--benchmark", "FashionMNIST", "--budget", "0s"]
    out = ["--out", str(tmp_path / "out"), "--device", "cpu", "--size", "tiny"]
    assert main([*options, *out]) == UNFINISHED
    assert "0 of 1 mixed datasets are made, 0 of 8 cells measured" in capsys.readouterr().out
    (tmp_path / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    assert main([*options, *out]) == 1
    assert "torchvision cannot read FashionMNIST there" in capsys.readouterr().err
