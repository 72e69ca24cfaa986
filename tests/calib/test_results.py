"""The list of measures, what is read of run folders, and how methods are compared."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semix.calib.metrics import calibration_metrics
from semix.calib.replicates import Comparison
from semix.calib.results import (
    RESULT_COLUMNS,
    by_data,
    load_methods,
    ranks,
    results,
    significant_change,
)
from semix.calib.shown_measures import ACCURACY, ECE, MEASURE, NLL, Summary, measures_in
from semix.data.errors import InputError
from tests.calib.measured import OOD_CELL, SHIFT, change_rows, make_run

MINUS = "\N{MINUS SIGN}"


def test_measures_are_those_of_calibration_metrics():
    got = calibration_metrics(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    shown = {measure.key for table in ("page", "run", "study") for measure in measures_in(table)}
    assert shown <= got.as_dict().keys()


@pytest.mark.parametrize(
    ("value", "text"), [(0.0481, "4.81"), (0.0, "0.00"), (-1e-6, "0.00"), (-0.02, f"{MINUS}2.00")]
)
def test_percent_text(value: float, text: str):
    assert ECE.text(value) == text
    assert NLL.text(0.0) == "0.000"


def test_a_value_alone_has_no_deviation():
    assert Summary.of([3.0]) == Summary(3.0, None)
    assert ECE.spread(Summary.of([0.03])) == "3.00"
    assert ECE.spread(Summary.of([0.03, 0.05])) == "4.00 ± 1.41"


@pytest.mark.parametrize(
    ("name", "head", "labels"),
    [
        ("CE", None, ["CE"]),
        ("CE", "mac_cal", ["CE", "CE + MaC-Cal"]),
        ("CE", "tst", ["CE", "CE + TST"]),
        ("CE", "vtst", ["CE", "CE + VTST"]),
        ("CE + TST, 20 wide", "tst", ["CE + TST, 20 wide: first stage", "CE + TST, 20 wide"]),
    ],
)
def test_a_head_is_named_by_its_method(tmp_path: Path, name, head, labels):
    run = make_run(tmp_path / "run", name, [{}], head=head)
    assert [method.label for method in load_methods([run])] == labels


def test_methods_on_other_images_are_told_apart(tmp_path: Path):
    data = [("digits", "a" * 64), ("digits", "b" * 64), ("imagefolder", "c" * 64)]
    runs = [make_run(tmp_path / d, "CE", [{}], real=(name, d)) for name, d in data]
    ls_run = make_run(tmp_path / "ls", "LS", [{}], real=data[0])
    groups = by_data(load_methods([*runs, ls_run]))
    assert [[method.label for method in group] for group in groups] == [
        ["CE, digits aaaaaaaa", "LS, digits aaaaaaaa"],
        ["CE, digits bbbbbbbb"],
        ["CE, imagefolder"],
    ]


def test_run_that_is_not_evaluated(tmp_path: Path):
    with pytest.raises(InputError, match=r"^run = .*/new: there is no such folder"):
        load_methods([tmp_path / "new"])
    with pytest.raises(InputError, match=r"^run = .*: holds no config\.json; name the folder of"):
        load_methods([tmp_path])


def test_evaluation_of_another_schema(runs: list[Path]):
    (runs[0] / "evaluation.json").write_text('{"schema": 1}')
    with pytest.raises(InputError, match="has schema 1 where 4 is needed"):
        load_methods(runs)


def test_runs_of_other_bins_are_refused(runs: list[Path]):
    change_rows(runs[1], bins=20)
    which = rf"{runs[0]}: 15; {runs[1]}: 20"
    way = r"semix train RUN/config\.json --out RUN --set evaluation\.bins=15"
    text = rf"bins = \[15, 20\]: errors of different bins cannot be compared \({which}\).*{way}"
    with pytest.raises(InputError, match=text):
        load_methods(runs)


def test_two_runs_of_one_name(runs: list[Path]):
    with pytest.raises(InputError, match="name = CE: two runs have this name"):
        load_methods([runs[0], runs[0]])


def test_no_runs():
    with pytest.raises(InputError, match="at least one finished run"):
        load_methods([])


@pytest.mark.parametrize(
    ("measure", "change", "expected"),
    [(ECE, -1.0, "better"), (ECE, 1.0, "worse"), (ACCURACY, 1.0, "better"), (NLL, 0.5, "worse")],
)
def test_better_follows_the_measure(measure, change, expected):
    clear = Comparison(change, change - 0.1, change + 0.1, 3, "seeds", 0.01)
    assert significant_change(clear, measure) == expected
    for low, high, n in ((-1.0, 1.0, 3), (change - 0.1, change + 0.1, 2), (None, None, 3)):
        assert significant_change(replace(clear, low=low, high=high, n=n), measure) == ""
    assert significant_change(clear, MEASURE["over_ece"]) == ""  # half of an error


def test_equal_values_share_the_mean_of_their_ranks():
    assert ranks([0.3, 0.1, 0.3, 0.2], ECE) == [3.5, 1, 3.5, 2]


def test_the_table_of_results_has_every_value_with_its_keys(tmp_path):
    folder = tmp_path / "r"
    run = make_run(folder, "CSM", [{"ece": 0.04}, {"ece": 0.06}], head="mac_cal")
    change_rows(run, shift=SHIFT, ood={"letters": {"images": 7, **OOD_CELL}, "mean": OOD_CELL})
    change_rows(run, conformal={"aps": {"coverage": 0.9, "size": 1.5}})
    table = results([run])
    assert list(table) == list(RESULT_COLUMNS)
    assert set(table["row"]) == {"CSM", "CSM + MaC-Cal"} and set(table["stage"]) == {"base", "head"}
    keys = ["row", "split", "seed", "kind", "part", "measure"]
    assert not table.duplicated(keys).any()
    ece = table.query("row == 'CSM' and part == 'test' and measure == 'ece'")
    assert ece.pivot(index="seed", columns="kind", values="value").to_dict() == {
        "plain": {0: 0.04, 1: 0.06},
        "scaled": {0: 0.02, 1: 0.03},
    }
    base = table.query("row == 'CSM' and seed == 0")
    parts = set(base["part"])
    assert parts == {
        *("test", "conformal", "shift", "ood", "ood letters"),
        *("shift fog 1", "shift fog 3", "shift fog mean"),
    }
    shifted = base.query("part == 'shift'").set_index(["kind", "measure"])["value"]
    assert shifted["plain", "ece"] == SHIFT["mean"]["ece"]
    assert shifted["scaled", "ece"] == SHIFT["mean"]["scaled_ece"]
    size = base.query("part == 'conformal' and measure == 'size'")
    assert size[["kind", "value"]].values.tolist() == [["aps", 1.5]]
