"""Which command a config is for, and what `semix config` says about its settings."""

import json
from itertools import permutations

import pytest

from semix.flows.configs import NAMES, models, reference
from tests.command import semix

CONFIGS = {
    "build": {"real": {"name": "digits"}, "generator": {"model": "/sd"}, "mixing": {}},
    "train": {"name": "CSM", "real": {"name": "digits"}, "model": {"name": "lenet"}},
    "study": {"name": "S", "base": {}, "datasets": {}, "methods": {}, "baseline": "ce"},
}


@pytest.mark.parametrize(("given", "command"), list(permutations(CONFIGS, 2)))
def test_a_config_of_another_command_is_told_its_own(given, command, tmp_path):
    config = tmp_path / "given.yaml"
    config.write_text(json.dumps(CONFIGS[given]))
    status, _, err = semix(command, str(config), "--out", str(tmp_path / "out"))
    remedy = f"semix {given} {config} --out PLACE"
    assert (status, err) == (2, f"error: config = {config}: is {NAMES[given]}: {remedy}\n")
    assert not (tmp_path / "out").exists()


def test_the_doctor_takes_no_study(tmp_path):
    config = tmp_path / "study.yaml"
    config.write_text(json.dumps(CONFIGS["study"]))
    status, _, err = semix("doctor", str(config))
    assert status == 2
    assert "is a study config; give that of a build, of a training run or of a loop" in err


def test_a_misspelling_in_a_config_of_this_command_is_named_as_such(tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps(CONFIGS["train"] | {"epoch": 3}))
    _, _, err = semix("train", str(config), "--out", str(tmp_path / "out"))
    assert "epoch: unknown setting; did you mean epochs?" in err


def test_a_setting_is_told_with_type_default_and_limits():
    status, out, _ = semix("config", "train", "evaluation.bins")
    assert status == 0
    assert out.splitlines() == [
        "evaluation.bins: whole number, at least 1; default 15",
        "    of every binned measure",
    ]
    (row,) = json.loads(semix("config", "build", "mixing.groups_per_pair", "--json")[1])
    assert (row["type"], row["required"], row["limits"]) == ("whole number", True, ["at least 1"])


def test_a_section_is_told_whole_and_parts_by_name():
    keys = [row["key"] for row in reference("train", "loss")]
    assert {"loss", "loss.name", "loss.gamma", "loss.smoothing"} <= set(keys)
    of_ls, _, of_fedlas_ls = reference("train", "loss.smoothing")
    assert (of_ls["type"], of_ls["default"]) == ("number", 0.05)
    assert of_fedlas_ls["limits"] == ["where loss.name is fedlas_ls", "at least 0", "at most 0.5"]
    rows = reference("train", "loss.ls")
    assert [row["key"] for row in rows] == ["loss.name", "loss.smoothing"]
    assert rows[0]["description"].startswith("Label smoothing. Source: ")
    assert {row["key"] for row in reference("train", "head.loss.ls")} == {
        "head.loss.name",
        "head.loss.smoothing",
    }
    (mac_cal, tst) = reference("train", "head.optimiser.learning_rate")
    assert (mac_cal["default"], tst["default"]) == (None, 1e-4)  # it follows the batch
    assert tst["limits"] == ["where head.method is tst or vtst", "above 0"]


@pytest.mark.parametrize("command", CONFIGS)
def test_every_setting_is_there_and_says_what_it_is(command):
    rows = reference(command)
    assert set(models()[command].model_fields) <= {row["key"] for row in rows}
    for row in rows:
        assert row["description"], row["key"]
        assert "any value" not in row["type"], row["key"]


def test_a_setting_that_is_not_there_gets_the_nearest():
    status, _, err = semix("config", "build", "annotation.modl")
    assert status == 2
    assert "did you mean annotation.model?" in err
