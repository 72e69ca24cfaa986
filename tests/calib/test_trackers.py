"""Trackers: each epoch is noted once, also after a resume; their failures are warnings."""

import resource
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from semix.calib.check import require_trackers
from semix.calib.stopping import Interrupted
from semix.calib.trackers import Tracking
from semix.calib.train import train_run
from semix.data.errors import InputError
from tests.calib.runs import history, stop_after

LINES = [
    {"stage": "base", "epoch": 0, "seconds": 1.5, "loss": 2.0, "smoothing": None},
    {"stage": "base", "epoch": 1, "seconds": 1.5, "loss": 1.0, "smoothing": 0.5},
    {"stage": "head", "epoch": 0, "seconds": 0.5, "loss": 3.0},
]


@pytest.fixture
def tracking(tmp_path, accelerator):
    """tracking(): TensorBoard of a seed, as a process that starts opens it."""

    def make() -> Tracking:
        settings = {"epochs": 2, "model": {"name": "lenet"}, "head": None}
        owner = Accelerator(log_with=["tensorboard"], project_dir=str(tmp_path))
        return Tracking(owner, tmp_path, label="all seed 0", settings=settings)

    return make


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All (step, value) per metric, in the order of the event files."""
    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_metrics_of_all_stages_are_in_tensorboard(tracking, tmp_path):
    first = tracking()
    first.start([])
    for position, line in enumerate(LINES, 1):
        first.note(position, line)
    first.close()
    expected = {
        "base/seconds": [(1, 1.5), (2, 1.5)],
        "base/loss": [(1, 2.0), (2, 1.0)],
        "base/smoothing": [(2, 0.5)],
        "head/seconds": [(3, 0.5)],
        "head/loss": [(3, 3.0)],
    }
    assert scalars(tmp_path) == expected
    again = tracking()  # after a cut that lost the last epoch
    again.start(LINES[:2])
    again.note(3, LINES[2])
    again.close()
    assert scalars(tmp_path) == expected


def test_what_else_lies_beside_events_stays(tracking, tmp_path):
    notes = tmp_path / "tensorboard" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("precious")
    for _ in range(2):
        opened = tracking()
        opened.start(LINES[:1])
        opened.close()
    assert notes.read_text() == "precious"
    assert scalars(tmp_path)["base/loss"] == [(1, 2.0)]


def test_a_resumed_run_has_each_epoch_of_its_history_once(make_run):
    run = make_run("run", "epochs=3", "checkpoint_every=2")
    with pytest.raises(Interrupted):
        train_run(run, stop=stop_after(4))
    train_run(run)
    values = scalars(run / "seed-0")
    lines = history(run)
    assert len(lines) == 7
    for stage in ("base", "head"):
        expected = [(n, line["loss"]) for n, line in enumerate(lines, 1) if line["stage"] == stage]
        assert values[f"{stage}/loss"] == [(n, pytest.approx(loss)) for n, loss in expected]


def test_a_tracker_that_cannot_start_is_a_warning(make_run, capsys):
    run = make_run("run", "epochs=1", "head=null")
    (run / "seed-0").mkdir()
    (run / "seed-0" / "tensorboard").write_text("in the way")
    train_run(run)
    assert (run / "evaluation.json").is_file()
    warning = capsys.readouterr().err
    assert "warning: all seed 0: tensorboard failed (" in warning
    assert warning.rstrip().endswith("; training continues, history.jsonl has all metrics")


# The writer's own thread dies of it, as it should.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_later_is_one_warning(tracking, tmp_path, capsys):
    tracker = tracking()
    tracker.start([])
    tracker.note(1, LINES[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))  # of any file, in bytes
    try:
        tracker.note(2, {"stage": "base", **{f"figure {n}": 1.0 for n in range(20_000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tracker.note(3, LINES[1])
    tracker.close()
    assert capsys.readouterr().err.count("warning: all seed 0: tensorboard failed (") == 1
    assert scalars(tmp_path)["base/loss"] == [(1, 2.0)]


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = make_run("run", "trackers=[tensorboard,wandb]")
    with pytest.raises(
        InputError, match=r"^trackers = wandb: is not installed; run `pip install wandb`"
    ):
        train_run(run)
    assert [path.name for path in run.iterdir()] == ["config.json"]
    require_trackers(["tensorboard"])


def test_mlflow_has_each_epoch_once_after_a_resume(make_run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = make_run("run", "trackers=[mlflow]", "epochs=3", "checkpoint_every=2", "head=null")
    with pytest.raises(RuntimeError, match="power cut"):
        train_run(run, stop=power_cut)
    train_run(run)
    [tracked] = mlflow.search_runs(experiment_names=["semix"], output_format="list")
    client = mlflow.MlflowClient()
    losses = client.get_metric_history(tracked.info.run_id, "base/loss")
    assert [(m.step, m.value) for m in losses] == [
        (n, line["loss"]) for n, line in enumerate(history(run), 1)
    ]
    assert tracked.data.params["model.name"] == "resnet8"
    assert tracked.info.run_name == "all seed 0"


def test_wandb_goes_on_in_one_run(make_run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run("run", "trackers=[wandb]", "epochs=3", "checkpoint_every=2", "head=null")
    with pytest.raises(Interrupted):
        train_run(run, stop=stop_after(1))
    train_run(run)
    folders = list((run / "seed-0" / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1


def power_cut() -> bool:
    raise RuntimeError("power cut")
