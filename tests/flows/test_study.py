"""A study on a real server with real trainers: stopped, continued, with a cell that fails."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pandas
import pytest
from PIL import Image
from prefect import flow
from prefect.client.orchestration import get_client
from safetensors import SafetensorError

from semix.calib.real_data import open_data
from semix.calib.run_folder import claim_run, pin_data
from semix.calib.study import StudyConfig, cells_of
from semix.calib.study_jobs import Job, check_same_images, failure_of
from semix.data.errors import InputError
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.flows import launcher, study_flow
from semix.flows.artifacts import artifact_key
from semix.flows.child import ChildExit
from semix.flows.launcher import TrainerExit
from semix.flows.study import StudyFailed, failure_message, study
from semix.flows.study_flow import TrainingFailure, work
from tests.trainings import trainer_of, wait_until

ROOT = Path(__file__).parents[2]
EPOCHS = 30
SETTINGS = {
    "name": "quick",
    "baseline": "ce",
    "seeds": [3],
    "base": {
        "real": {"name": "digits", "train_per_class": 10, "validation_per_class": 5},
        "model": {"name": "resnet8", "width": 2},
        "epochs": EPOCHS,
        "batch_size": 20,
        "augment": {"shift": 0},
        "checkpoint_every": 1,
        "trackers": [],
        "evaluation": {"bootstrap": 0},
    },
    "datasets": {"digits": {}},
    "methods": {  # with one first stage, which the first trains; its head then diverges
        "mac": {"overrides": {"head": {"batch_size": 20, "optimiser": {"learning_rate": 1e30}}}},
        "ce": {"name": "CE"},
    },
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(SETTINGS))
    return path


def epochs_of(run):
    lines = (run / "seed-3/history.jsonl").read_text().splitlines()
    return [line["epoch"] for line in map(json.loads, lines) if line["stage"] == "base"]


def test_it_goes_on_after_a_stop_and_a_failing_cell_stops_no_other(
    prefect_api, config, tmp_path, until, artifacts_of
):
    out = tmp_path / "out"
    mac, ce = out / "digits" / "mac", out / "digits" / "ce"
    child = subprocess.Popen(
        [sys.executable, "-m", "semix.flows.cli", "study", str(config), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": prefect_api},
    )
    until(lambda: list(mac.glob("seed-3/checkpoint/0*")))
    child.send_signal(signal.SIGTERM)
    assert child.wait(150) == 128 + signal.SIGTERM
    assert 1 <= len(epochs_of(mac)) < EPOCHS
    assert not (out / "study.json").exists()

    with pytest.raises(StudyFailed) as caught:
        study(config, out)
    text = str(caught.value)
    assert text.startswith("1 of 2 cells are not measured:\ndigits/mac: diverged: ")
    assert "only these cells add --only digits/mac" in text
    assert epochs_of(mac) == list(range(EPOCHS))
    assert epochs_of(ce) == []  # its first stage is that of mac
    record = json.loads((out / "study.json").read_text())
    assert record["missing"]["digits/mac"].startswith("diverged: ")
    (measured,) = json.loads((ce / "evaluation.json").read_text())["rows"]
    (row,) = [row for row in record["test"]["digits"]["rows"] if row["method"] == "CE"]
    assert row["summary"]["nll_scaled"]["mean"] == measured["kinds"]["scaled"]["nll"]
    values = pandas.read_csv(out / "values.csv").query("row == 'CE' and kind == 'plain'")
    assert {key: values[key].item() for key in measured["kinds"]["plain"]} == pytest.approx(
        measured["kinds"]["plain"]
    )

    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(limit=1, sort="START_TIME_DESC")[0]
        assert run.name == "study study into out"
        assert set(run.tags) == {"semix", "study"}
        key = artifact_key("study", str(out))
        artifacts = artifacts_of(run.id)
    assert artifacts[key]["description"] == "2 of 2 trainings ended"
    assert "digits/mac: diverged" in artifacts[f"{key}-results"]["data"].replace("\\", "")

    modified = (ce / "evaluation.json").stat().st_mtime_ns
    study(config, out, only=["*/ce"])  # measured: nothing is started
    assert (ce / "evaluation.json").stat().st_mtime_ns == modified


def test_a_trainer_of_a_study_that_was_killed_is_started_again(
    prefect_api, config, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.5)
    out = tmp_path / "out"
    run = out / "digits" / "ce"

    def kill() -> None:
        wait_until(lambda: list(run.glob("seed-3/checkpoint/0*")))
        trainer_of(run).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    study(config, out, only=["*/ce"], restarts=1)
    killer.join()
    assert "; started again in 0 s, from the last checkpoint" in caplog.text
    assert epochs_of(run) == list(range(EPOCHS)) and (run / "evaluation.json").is_file()


@pytest.fixture
def replicated(tmp_path):
    """A study of two splits, each with models and a mixed dataset, and a method with a grid."""
    base = {**SETTINGS["base"], "epochs": 1, "evaluation": {"bootstrap": 20}}
    build = {
        "generator": {"steps": 2, "guidance_scale": 1.0},
        "mixing": {"alphas": 2, "groups_per_pair": 1},
        "shards": {"groups_per_shard": 5, "groups_per_batch": 5},
    }
    grid = {"w": {"w 1": {"mixed.weight": 1.0}, "w 2": {"mixed.weight": 2.0}}}
    csm = {"name": "CSM", "mixed": "random", "grid": grid, "chosen": {"CSM, chosen": {}}}
    values = {
        **SETTINGS,
        "seeds": [0, 1],
        "splits": [0, 1],
        "draws": [5],
        "standins": "tiny",
        "base": base,
        "builds": {"random": build},
        "methods": {"ce": {"name": "CE"}, "csm": csm},
    }
    path = tmp_path / "replicated.yaml"
    path.write_text(json.dumps(values))
    return path


def test_a_study_makes_its_mixed_datasets_and_goes_on_when_it_is_killed(
    prefect_api, replicated, tmp_path, until, monkeypatch
):
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-m", "semix.flows.cli", "study", str(replicated), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": prefect_api},
        start_new_session=True,
    )
    until(lambda: list(out.glob("mixed/digits-split0-draw5-random/shards/*/*.tar")))
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    tars = {path: path.stat().st_mtime_ns for path in out.glob("mixed/*/shards/*/*.tar")}
    assert not list(out.glob("*/*/seed-*"))

    # A root goes on with the models it was begun with, though another version trains others.
    monkeypatch.setattr("semix.pipeline.standins.LIBRARIES", ("torch",))
    record = study(replicated, out, slots=2)
    assert record["missing"] == {}
    assert len(list(out.glob("models/*/diffusion"))) == 2
    assert {path: path.stat().st_mtime_ns for path in tars} == tars
    roots = [Root(str(out / "mixed" / f"digits-split{split}-draw5-random")) for split in (0, 1)]
    plans = [root.plan.config for root in roots]
    assert [plan["real"]["split_seed"] for plan in plans] == [0, 1]
    assert [plan["mixing"]["seed"] for plan in plans] == [5, 5]
    trained_on = json.loads((out / "digits-split1-draw5/csm+w-2/data.json").read_text())
    assert trained_on["mixed"]["url"] == roots[1].url
    mixed = pandas.read_csv(out / "mixed.csv")
    table = mixed[["build", "split", "draw", "images"]].values.tolist()
    assert table == [["random", 0, 5, 90], ["random", 1, 5, 90]]
    assert mixed["end_points"].between(0, 1).all()
    assert "## Mixed images" in (out / "study.md").read_text()
    rows = {row["method"]: row for row in record["test"]["digits"]["rows"]}
    assert {name: row["units"] for name, row in rows.items()} == dict.fromkeys(
        ["CE", "CSM (w 1)", "CSM (w 2)", "CSM, chosen"], 4
    )
    assert sum(rows["CSM, chosen"]["chosen"].values()) == 2
    frame = pandas.read_csv(out / "resamples.csv.gz")
    assert len(frame) == 4 * 4 * 2 * 20
    evaluations = {path: path.stat().st_mtime_ns for path in out.glob("*/*/evaluation.json")}
    study(replicated, out)
    assert {path: path.stat().st_mtime_ns for path in evaluations} == evaluations


def test_a_slot_whose_gpu_torch_cannot_use_does_not_go_on_without(
    prefect_api, config, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "63")  # no machine has so many
    message = "digits/ce: slot 0: GPU 63 does not work: .*; device = cuda: torch sees no GPU"
    with pytest.raises(StudyFailed, match=message):
        study(config, tmp_path / "out", only=["*/ce"])
    assert "GPU 63 does not work" in failure_of(tmp_path / "out" / "digits" / "ce")


def test_a_slot_whose_gpu_is_lost_ends_and_others_go_on(prefect_api, tmp_path, monkeypatch, caplog):
    jobs = [Job((f"a/{number}", f"b/{number}"), (0,)) for number in range(4)]
    for job in jobs:
        for run in job.runs:
            (tmp_path / run).mkdir(parents=True)
    trained, lost_runs, other_slot_works = [], [], threading.Event()

    def train(run, job, *, environment, **_):
        if environment != {"CUDA_VISIBLE_DEVICES": "4"}:
            other_slot_works.wait(60)  # the other slot has a job
        elif lost_runs:
            return TrainingFailure("crashed: CUDA error")
        else:
            lost_runs.extend(job.runs[1:])
            other_slot_works.set()
        trained.append(str(run.relative_to(tmp_path)))
        return None

    monkeypatch.setattr(study_flow, "train_run", train)
    faults = {"4": "it does not answer", "7": ""}
    monkeypatch.setattr(study_flow, "gpu_fault", lambda e, _: faults[e["CUDA_VISIBLE_DEVICES"]])
    monkeypatch.setattr(study_flow, "load_settings", lambda *_: None)
    monkeypatch.setattr(
        study_flow, "is_measured", lambda _, run: str(run.relative_to(tmp_path)) in trained
    )

    @flow
    def all_of_them():
        with study_flow.run_jobs(jobs, tmp_path, slots=2, gpus=["4", "7"]):
            other_slot_works.wait(60)  # they work while the block does

    with pytest.raises(StudyFailed) as caught:
        all_of_them()
    [run] = lost_runs
    assert sorted([*trained, run]) == sorted(run for job in jobs for run in job.runs)
    text = "slot 0: GPU 4 does not work: it does not answer"
    assert f"\n{run}: {text}; crashed: CUDA error\n" in str(caught.value)
    assert f"{text}; other slots go on" in caplog.text


def test_a_damaged_file_of_one_run_ends_no_slot(prefect_api, tmp_path, monkeypatch):
    def copy_first_stage(run, seed):
        if run.name == "damaged":
            raise SafetensorError("header too small")

    monkeypatch.setattr(study_flow, "copy_first_stage", copy_first_stage)
    ended = TrainerExit(ChildExit(1, 0, False, False, ()), ())
    monkeypatch.setattr(study_flow, "run_trainer", lambda *_, **__: ended)
    monkeypatch.setattr(study_flow, "load_settings", lambda *_: None)
    (tmp_path / "a" / "damaged").mkdir(parents=True)
    ended_runs = SimpleQueue()

    @flow
    def one():
        jobs, stop = SimpleQueue(), threading.Event()
        jobs.put(Job(("a/damaged", "a/whole"), (0,)))
        future = work.submit(
            *(0, tmp_path, jobs),
            **{"slots": 1, "restarts": 0, "environment": {}, "stop": stop, "ended": ended_runs},
        )
        return future.result()

    assert one() == {"slot": 0, "runs": ["a/damaged", "a/whole"]}
    assert failure_of(tmp_path / "a" / "damaged") == "header too small"
    assert ended_runs.qsize() == 2


def test_what_cannot_be_run_starts_nothing(config, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"^digits/mac: loss\.name = x: choose one of"):
        study(config, out, overrides=["base.loss.name=x"])
    with pytest.raises(InputError, match=r"^--slots = 191: choose 1 to 190"):
        study(config, out, slots=191)
    with pytest.raises(InputError, match=r"^--only = digits: no cell has this name"):
        study(config, out, only=["digits"])
    assert not out.exists()
    with pytest.raises(InputError, match=r"^out = gs://bucket/x: must be a folder"):
        study(config, "gs://bucket/x")


def test_a_cell_of_other_settings_is_refused_though_others_are_chosen(config, tmp_path):
    """The tables show all cells, and would be refused when the chosen ones are trained."""
    out = tmp_path / "out"
    ce = next(c for c in cells_of(load_settings(StudyConfig, config)) if c.method == "ce")
    other_settings = ce.config.model_copy(update={"epochs": 1})
    (claim_run(other_settings, ce.run(out)).parent / "seed-3").mkdir()
    with pytest.raises(InputError, match=r"digits/ce: was begun with other settings \(epochs: 1"):
        study(config, out, only=["*/mac"])
    assert not (out / "digits" / "mac").exists()


def test_images_that_changed_since_a_study_began_are_named_before_anything_is_trained(
    config, digits, tmp_path
):
    out, pictures = tmp_path / "out", tmp_path / "pictures"
    train = digits.train
    for number, (image, target) in enumerate(zip(train.images(), train.targets, strict=True)):
        path = pictures / str(target) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    overrides = [f"base.real={{name: imagefolder, path: {pictures}}}"]
    ce = next(
        c for c in cells_of(load_settings(StudyConfig, config, overrides)) if c.method == "ce"
    )
    claim_run(ce.config, ce.run(out))
    pin_data(open_data(ce.config).record, ce.run(out))
    (ce.run(out) / "seed-3").mkdir()
    check_same_images([ce], [ce], out)
    path.unlink()
    with pytest.raises(InputError, match=r"ce/data\.json real = \w+: is not the digest of the im"):
        study(config, out, overrides=overrides, only=["*/mac"])
    assert not (out / "digits" / "mac").exists()


def test_a_failure_names_cells_reasons_and_the_way_on(tmp_path):
    text = failure_message({"a/b": "it broke", "a/c": "not run"}, cells=5, out=tmp_path)
    assert text.splitlines() == [
        "2 of 5 cells are not measured:",
        "a/b: it broke",
        "a/c: not run",
        f"{tmp_path / 'study.md'} shows the measured cells; the same command goes on; to run",
        "only these cells add --only a/b --only a/c",
    ]
