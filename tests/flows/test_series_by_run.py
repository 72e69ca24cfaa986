"""Series where a run's classifiers confuse classes: a build, an extension, and what is refused."""

import json
from collections import Counter

import pytest

from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.formats import SeriesByRun
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.flows.build import check
from semix.flows.series_by_run import check_classes, series_of_config, start_build
from semix.pipeline.config import PairsConfig
from tests.command import semix
from tests.pipeline.roots import altered, plan_of, samples

REAL = {"name": "digits", "set_aside_per_class": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A classifier that confuses some digits."""
    values = {
        "name": "judge",
        "seeds": [0],
        "real": REAL,
        "model": {"name": "lenet"},
        "epochs": 4,
        "batch_size": 20,
        "optimiser": {"name": "adamw", "learning_rate": 3e-3},
        "trackers": [],
        "evaluation": {"bootstrap": 0},
    }
    folder = tmp_path_factory.mktemp("judge") / "run"
    train_run(claim_run(load_settings(TrainConfig, values), folder).parent)
    return folder


def test_a_build_gives_confused_pairs_more_series_and_needs_the_run_no_more(
    run, hasty_config, tmp_path
):
    pairs = f"mixing.pairs={{kind: confused, run: {run}}}"
    config = altered(hasty_config, pairs, "mixing.groups_per_pair=2")
    root = start_build(config, str(tmp_path / "root"), device="cpu").root
    by_run = root.stored_plan.by_run
    counts = Counter(plan_of(root).group(i).classes for i in range(90))
    assert counts == {(first, second): count for first, second, count in by_run.series}
    assert max(counts.values()) > 2 > min(counts.values())
    assert (by_run.run, by_run.by, by_run.images) == (str(run), "confusion", 40)
    again = altered(config, f"mixing.pairs.run={run}")
    assert start_build(again, root.url, device="cpu").root.stored_plan == root.stored_plan
    (first,) = root.status()["rounds"]
    assert first["by"] == f"confusion, {run}" and first["digest"] == by_run.digest


def test_a_run_of_other_classes_is_refused(run, hasty_config):
    config = altered(hasty_config, f"mixing.pairs={{kind: confused, run: {run}}}")
    with pytest.raises(InputError, match=r"has classes zero, one, .* and these data others"):
        series_of_config(config, [*map(str, range(10))], device="cpu")


def test_a_check_refuses_a_run_that_cannot_judge(hasty_config, tmp_path):
    config = altered(hasty_config, f"mixing.pairs={{kind: confused, run: {tmp_path}}}")
    with pytest.raises(InputError, match=r"run = .*: holds no config\.json; name the folder of a"):
        check(config, str(tmp_path / "root"), device="cpu")
    assert not (tmp_path / "root").exists()


def test_a_class_that_no_series_would_show_is_named():
    pairs = PairsConfig(kind="confused", run="/runs/ce", even=0)
    shared = SeriesByRun(run="/runs/ce", digest="1a", by="confusion", images=9, series=[(0, 2, 9)])
    with pytest.raises(InputError, match=r"mixing\.pairs\.even = 0\.0: leaves class 'bee' without"):
        check_classes(shared, ["ant", "bee", "cat"], pairs)


@pytest.mark.process
def test_an_extension_by_a_run_is_built_and_shown(prefect_api, run, root):
    status, out, err = semix(
        "extend", root.url, "--by-run", str(run), "--series", "7", "--slots", "1"
    )
    assert status == 0, err
    assert f"7 series in shards 8-9, confusion, {run}" in out
    longer = Root(root.url)
    assert longer.missing() == [] and longer.plan.num_groups == 52
    added = [sample for group, sample in samples(longer).items() if group >= 45]
    asked = longer.extensions[0].by_run
    counts = Counter(tuple(sample.record.classes) for sample in added)
    assert counts == {(first, second): count for first, second, count in asked.series}
    rounds = json.loads(semix("status", root.url, "--json")[1])["rounds"]
    assert rounds[1]["digest"] == json.loads((run / "evaluation.json").read_text())["digest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by-run", "{run}"], "give a root and --groups-per-pair, or a root, --by-run and --s"),
        (["--series", "3"], "give a root and --groups-per-pair, or a root, --by-run and --series"),
        (["--by-run", "{run}", "--series", "-1"], "series = -1: give the number of series to add"),
        (["--by-run", "{run}", "--series", "1", "--even", "2"], "even = 2.0: give a share betw"),
        (["--by-run", "/no", "--series", "1"], "run = /no: there is no such folder"),
        (["--by-run", "{run}", "--series", "100000000"], "a root has at most 100,000,000 series"),
    ],
)
def test_what_cannot_be_added_is_refused(run, root, options, message):
    before = root.store.list("")
    status, _, err = semix("extend", root.url, *(option.format(run=run) for option in options))
    assert status == 2 and message in err
    assert root.store.list("") == before
