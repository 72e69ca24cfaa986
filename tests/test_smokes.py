"""One real run per command: real processes, a real Prefect server, small enough for `make test`.

The run of `train`, stopped and resumed, is in tests/calib/test_train.py.
"""

import json

import pytest

from semix.data.label_sets import LabelSet
from semix.flows.study import study
from tests.command import semix
from tests.integration.test_kill import survive, write_config

pytestmark = pytest.mark.smoke


def test_a_build_that_was_killed_ends_as_an_unbroken_one(
    hasty_config, built, tmp_path, prefect_api
):
    file = write_config(hasty_config, tmp_path)
    survive(1, file, built, prefect_api, longest_s=0.2, slots=1)


def test_images_are_labelled_anew_by_another_clip(root, other_clip, prefect_api):
    change = f"annotation.model=local-dir:{other_clip}"
    status, out, err = semix("relabel", root.url, "--set", change, "--json")
    assert status == 0, err
    facts = json.loads(out)
    assert (facts["done"], facts["features"]) == (8, "images")
    assert LabelSet(root, facts["digest"]).missing() == []


def test_a_small_study_ends_in_its_table(prefect_api, tmp_path):
    settings = {
        "name": "small",
        "baseline": "ce",
        "seeds": [3],
        "base": {
            "real": {"name": "digits", "train_per_class": 10, "validation_per_class": 5},
            "model": {"name": "lenet"},
            "epochs": 2,
            "batch_size": 20,
            "evaluation": {"bootstrap": 0},
        },
        "datasets": {"digits": {}},
        "methods": {"ce": {"name": "CE"}},
    }
    config, out = tmp_path / "study.yaml", tmp_path / "out"
    config.write_text(json.dumps(settings))
    study(config, out)
    (seed_row,) = json.loads((out / "digits/ce/evaluation.json").read_text())["rows"]
    (row,) = json.loads((out / "study.json").read_text())["test"]["digits"]["rows"]
    plain, summary = seed_row["kinds"]["plain"], row["summary"]
    means = {key: summary[key]["mean"] for key in plain if key in summary}
    assert {"accuracy", "ece", "nll", "brier"} <= means.keys()
    assert means == {key: plain[key] for key in means}
    assert "CE" in (out / "study.md").read_text()
