"""The list of measures, what is read of run folders, and how methods are compared."""

from pathlib import Path

import pytest
import torch

from calib.metrics import calibration_metrics
from calib.results import (
    ACCURACY,
    ECE,
    NLL,
    Summary,
    by_data,
    compare,
    holm,
    load_methods,
    ranks,
    shown_in,
)
from data.errors import InputError
from tests.calib.measured import change_rows, make_run

MINUS = "\N{MINUS SIGN}"


def test_only_shared_seeds_are_paired(runs: list[Path], tmp_path: Path):
    one = make_run(tmp_path / "one", "one seed", [{"ece": 0.01}])
    baseline, *_, short = load_methods([*runs, one])
    got = compare(short.values(ECE), baseline.values(ECE), ECE)
    assert got is not None
    assert (got.change, got.better, got.shared) == (pytest.approx(0.01 - 0.04), 1, 1)


def test_measures_are_those_of_calibration_metrics():
    got = calibration_metrics(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    shown = {measure.key for place in ("page", "run", "study") for measure in shown_in(place)}
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
    other = make_run(tmp_path / "ls", "LS", [{}], real=data[0])
    groups = by_data(load_methods([*runs, other]))
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
    with pytest.raises(InputError, match="schema 1 where 2 is read"):
        load_methods(runs)


def test_runs_of_other_bins_are_refused(runs: list[Path]):
    change_rows(runs[1], bins=20)
    text = r"bins = \[15, 20\]: errors of different bins cannot be compared.*evaluation\.bins=15"
    with pytest.raises(InputError, match=text):
        load_methods(runs)


def test_two_runs_of_one_name(runs: list[Path]):
    with pytest.raises(InputError, match="name = CE: two runs have this name"):
        load_methods([runs[0], runs[0]])


def test_no_runs():
    with pytest.raises(InputError, match="at least one finished run"):
        load_methods([])


def test_the_paired_test_is_student_s_over_the_differences():
    # Differences -1, -2, -3: mean -2, deviation 1, so t = -2 sqrt(3) with two degrees of freedom,
    # for which the two-sided p is 1 - |t| / sqrt(t^2 + 2) = 1 - sqrt(12 / 14).
    found = compare({0: 4.0, 1: 3.0, 2: 5.0, 9: 0.0}, {0: 5.0, 1: 5.0, 2: 8.0}, ECE)
    assert found is not None
    assert (found.change, found.better, found.shared) == (-2, 3, 3)
    assert found.p == pytest.approx(1 - (12 / 14) ** 0.5)


def test_better_follows_the_measure_and_ties_are_not_better():
    new, old = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 1.0, 2: 4.0}
    for measure in (ACCURACY, ECE):
        found = compare(new, old, measure)
        assert found is not None
        assert found.better == 1


def test_without_three_shared_seeds_or_any_spread_there_is_no_p():
    def p(*changes):
        new = {seed: 1.0 + change for seed, change in enumerate(changes)}
        found = compare(new, dict.fromkeys(new, 1.0), ACCURACY)
        assert found is not None
        return found.p

    assert p(0.5, 0.25) is None
    assert p(0.5, 0.5, 0.5) is None
    assert p(0.5, 0.25, 0.125) is not None
    assert compare({0: 1.0}, {1: 1.0}, ACCURACY) is None


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # Sorted: 0.01 x 4, 0.02 x 3, 0.025 x 2 = 0.05 but not below 0.06, 0.7 x 1.
    assert holm([0.025, None, 0.01, 0.7, 0.02]) == pytest.approx([0.06, None, 0.04, 0.7, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_equal_values_share_the_mean_of_their_ranks():
    assert ranks([0.3, 0.1, 0.3, 0.2], ECE) == [3.5, 1, 3.5, 2]
