"""A loop: its rounds, killed and resumed to the same bytes; its page; what it refuses."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from pandas import read_csv
from safetensors.torch import load_file

from semix.data.errors import InputError
from semix.data.formats import SeriesByRun
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.flows.loop import loop, loop_runs, prepare_loop
from semix.flows.loop_config import LoopConfig
from semix.pipeline.root import create_build, extend_root_by_run
from tests.command import semix
from tests.pipeline.roots import plan_of, tars

ROOT = Path(__file__).parents[2]
TRAIN = {
    "seeds": [0, 1],
    "model": {"name": "lenet"},
    "epochs": 3,
    "batch_size": 50,
    "augment": {"shift": 0},
    "optimiser": {"name": "adamw", "learning_rate": 3e-3},
    "mixed": {"loss": "soft_ce", "weight": 0.1},
    "trackers": [],
    "checkpoint_every": 1,
    "evaluation": {"bootstrap": 20},
}


@pytest.fixture
def config(hasty_config, tmp_path):
    build = hasty_config.model_dump(mode="json", exclude_defaults=True)
    build.pop("real")
    values = {
        "name": "a loop",
        "real": {"name": "digits", "set_aside_per_class": 6},
        "build": build,
        "train": TRAIN,
        "series_per_pair": 1,
    }
    path = tmp_path / "loop.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.process
def test_rounds_that_were_killed_go_on_to_the_same_bytes(prefect_api, config, tmp_path, until):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    record = loop(config, whole, rounds=1)
    assert [each["series"] for each in record["rounds"]] == [45, 90]
    assert record["rounds"][0]["change"] == {} and len(record["rounds"][1]["change"]["nll"]) == 3
    chosen, even = Root(str(whole / "mixed")), Root(str(whole / "mixed-even"))
    for root in (chosen, even):
        assert root.plan.num_groups == 90 and root.missing() == []
    assert {plan_of(even).group(i).classes for i in range(45, 90)} == {
        plan_of(even).group(i).classes for i in range(45)
    }
    asked = chosen.extensions[0].by_run
    counts = Counter(plan_of(chosen).group(i).classes for i in range(45, 90))
    assert counts == {(first, second): n for first, second, n in asked.series}
    judge = json.loads((whole / "round-0/even/evaluation.json").read_text())
    assert asked.digest == judge["digest"] and asked.images == 60
    assert (
        json.loads((whole / "round-1/even/data.json").read_text())["mixed"]["index"]
        == "index/1.json"
    )
    page = (whole / "loop.html").read_text()
    assert "<h2>Rounds</h2>" in page and "round 1, by confusion against round 1, even" in page

    stages = (
        lambda: list((broken / "mixed").glob("shards/0000/*.json")),
        lambda: (broken / "mixed/extensions/1.json").exists(),
        lambda: list(broken.glob("round-1/*/seed-0/checkpoint/0*")),
    )
    arguments = ("loop", str(config), "--out", str(broken), "--rounds", "1")
    environment = {**os.environ, "PREFECT_API_URL": prefect_api}
    for reached in stages:
        command = [sys.executable, "-m", "semix.flows.cli", *arguments]
        child = subprocess.Popen(command, cwd=ROOT, env=environment)
        until(reached)
        child.send_signal(signal.SIGTERM)
        assert child.wait(150) == 128 + signal.SIGTERM
    status, out, err = semix(*arguments, "--json")
    assert status == 0, err
    assert [each["series"] for each in json.loads(out)["rounds"]] == [45, 90]
    for kind in ("mixed", "mixed-even"):
        made, expected = (tars(Root(str(folder / kind))) for folder in (broken, whole))
        assert made == {name: expected[name] for name in made} and len(made) == 16
    weights = sorted(path.relative_to(broken) for path in broken.glob("round-*/*/seed-1/model.*"))
    assert len(weights) == 3
    for path in weights:
        made, expected = load_file(broken / path), load_file(whole / path)
        assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_each_split_and_draw_has_its_seeds_and_its_folder(config, tmp_path):
    overrides = ["splits=[0, 1]", "draws=[0, 3]"]
    replicates = prepare_loop(config, tmp_path / "out", overrides, rounds=1, slots=0).replicates
    assert [each.out.name for each in replicates] == [
        f"loop-split{split}-draw{draw}" for split in (0, 1) for draw in (0, 3)
    ]
    last = replicates[-1]
    assert last.settings.build_config().mixing.seed == 3
    assert {run.config.real.split_seed for run in last.runs} == {1}
    assert {Path(run.config.mixed.url).parent for run in last.runs} == {last.out}


def test_splits_can_be_added_before_those_that_began(config, tmp_path):
    out = tmp_path / "out"
    (out / "loop-split1").mkdir(parents=True)
    prepare_loop(config, out, ["splits=[0, 1]"], rounds=1, slots=0)
    with pytest.raises(InputError, match=r"holds loop-split1, and is no loop"):
        prepare_loop(config, out, ["splits=[0]"], rounds=1, slots=0)


@pytest.mark.slow
def test_more_rounds_and_fewer(prefect_api, config, tmp_path):
    out = tmp_path / "out"
    first = loop(config, out, rounds=1)
    record = loop(config, out, rounds=2)
    assert [each["series"] for each in record["rounds"]] == [45, 90, 135]
    assert record["rounds"][:2] == first["rounds"]
    fewer = loop(config, out, rounds=1)  # all of it is measured
    assert fewer["rounds"] == first["rounds"]


@pytest.mark.slow
def test_splits_and_draws_are_replicates_of_one_table(prefect_api, config, tmp_path):
    out = tmp_path / "out"
    overrides = ["splits=[0, 1]", "draws=[0, 3]", "train.seeds=[0]"]
    record = loop(config, out, rounds=1, overrides=overrides)
    assert record["replicates"] == [[0, 0], [0, 3], [1, 0], [1, 3]]
    values = read_csv(out / "values.csv")
    shown = values[(values.measure == "nll") & (values.part == "test") & (values.kind == "plain")]
    assert shown.groupby(["split", "draw"]).size().to_dict() == {
        (split, draw): 3 for split in (0, 1) for draw in (0, 3)
    }
    chosen, even = (
        shown[shown.row == f"round 1, {how}"].value.to_numpy() for how in ("by confusion", "even")
    )
    change, low, high = record["rounds"][1]["change"]["nll"]
    assert change == pytest.approx((chosen - even).mean(), abs=1e-6) and low < change < high
    assert "4 splits and draws; mean" in (out / "loop.md").read_text()
    for name in ("loop-split0-draw0", "loop-split1-draw3"):
        assert (out / name / "loop.html").is_file() and (out / name / "mixed-even").is_dir()
    first, second = (
        json.loads((out / f"loop-split{split}-draw0/round-0/even/data.json").read_text())["real"]
        for split in (0, 1)
    )
    assert first != second


def test_runs_have_round_and_kind_in_their_names(config, tmp_path):
    runs = loop_runs(load_settings(LoopConfig, config), tmp_path, 2)
    assert [(run.cell.name, run.config.name) for run in runs] == [
        ("round-0/even", "round 0"),
        ("round-1/confusion", "round 1, by confusion"),
        ("round-1/even", "round 1, even"),
        ("round-2/confusion", "round 2, by confusion"),
        ("round-2/even", "round 2, even"),
    ]
    assert [run.folder for run in runs] == [run.cell.run(tmp_path) for run in runs]
    assert runs[2].config.mixed.url == str(tmp_path / "mixed-even")
    assert {run.config.real.set_aside_per_class for run in runs} == {6}


def test_rounds_of_other_settings_are_named(config, tmp_path):
    settings = load_settings(LoopConfig, config)
    out = tmp_path / "out"
    root = create_build(settings.build_config(), str(out / "mixed"), device="cpu").root
    asked = SeriesByRun(run="/runs/0", digest="1a", by="confusion", images=60, series=[(0, 1, 45)])
    extend_root_by_run(root, 45, lambda: asked)
    prepare_loop(config, out, [], rounds=2, slots=0)
    with pytest.raises(InputError, match=r"series_per_pair = 2: round 1 has 1; restore that"):
        prepare_loop(config, out, ["series_per_pair=2"], rounds=2, slots=0)
    with pytest.raises(
        InputError, match=r"by = calibration: round 1 was planned by confusion; restore"
    ):
        prepare_loop(config, out, ["by=calibration"], rounds=2, slots=0)


@pytest.mark.parametrize(
    ("override", "options", "message"),
    [
        ("real.set_aside_per_class=null", {}, "`real.set_aside_per_class` is needed"),
        ("train.name=x", {}, r"`train\.name`: leave it out; `name` of the loop is taken"),
        ("train.epochs=0", {}, r"^train: epochs = 0"),
        ("build.mixing.classes=3", {}, r"^build: .*mixing 3 or more classes wants"),
        (
            "build.mixing.pairs={kind: sampled, count: 3}",
            {},
            r"^build: mixing\.pairs = sampled: a loop begins with all pairs",
        ),
        ("series_per_pair=0", {}, r"series_per_pair = 0"),
        ("series_per_pair=2000000", {"rounds": 3}, r"^--rounds = 3: ends with 270,000,045 series"),
        ("name=x", {"rounds": 0}, r"^--rounds = 0: choose 1 to 100"),
        ("name=x", {"slots": 500}, r"^--slots = 500: choose 1 to 190"),
    ],
)
def test_what_cannot_be_run_starts_nothing(config, tmp_path, override, options, message):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message):
        prepare_loop(config, out, [override], **{"rounds": 2, "slots": 0, **options})
    assert not out.exists()
