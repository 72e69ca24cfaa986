"""The tables of a few handmade runs: every value is worked out by hand."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from semix.calib.replicates import Unit
from semix.calib.results import load_methods
from semix.calib.tables import (
    as_markdown,
    comparison,
    details,
    differences,
    improvements,
    overview,
    print_table,
    summary_table,
)
from semix.calib.verdicts import headlines
from tests.calib.measured import OOD_CELL, SHIFT, change_rows, make_run, measures


def test_best_mean_is_marked_and_equal_texts_share_the_mark(runs: list[Path]):
    by_method = comparison(load_methods(runs))
    ece = [[row.cells[1].best for row in rows] for rows in by_method]
    assert ece == [[False, False], [True, True], [True, True]]
    accuracy = [[row.cells[0].best for row in rows] for rows in by_method]
    assert accuracy == ece  # the same methods, though higher accuracy is better
    nll = [[row.cells[6].best for row in rows] for rows in by_method]
    assert nll == [[True, True], [False, False], [False, False]]


def test_a_method_alone_is_not_the_best(runs: list[Path]):
    (rows,) = comparison(load_methods(runs[:1]))
    assert not any(cell.best for row in rows for cell in row.cells)


def test_without_shared_seeds_nothing_is_paired(runs: list[Path]):
    ce, csm, _ = load_methods(runs)
    late = replace(csm, seeds={Unit(0, None, 9): csm.seeds[0, None, 0]})
    assert differences([ce, late])[0][0].cells[1].note == "no shared seed"
    assert "no shared seeds" in headlines([ce, late])[0]


def test_summary_table_by_hand(runs: list[Path]):
    got = summary_table(load_methods(runs))
    assert [row["method"] for row in got] == ["CE", "CSM", "CSM + MaC-Cal"]
    assert got[0]["seeds"] == 2
    assert got[0]["plain"]["ece"] == pytest.approx({"mean": 0.05, "sd": 0.0002**0.5})
    assert got[0]["scaled"]["ece"]["mean"] == pytest.approx(0.025)
    json.dumps(got, allow_nan=False)


def test_print_table_fits_a_terminal_and_keeps_brackets(tmp_path: Path):
    run = make_run(tmp_path / "r", "[red]CE[/red]", [{"ece": 0.04}, {"ece": 0.06}])
    console = Console(width=80, file=io.StringIO(), record=True)
    print_table(overview(load_methods([run])), console)
    text = console.export_text()
    assert "[red]CE[/red]" in text and "5.00±1.41" in text and "2.50±0.71" in text


def test_an_evaluation_is_printed_with_intervals_shift_and_ood_images(tmp_path: Path):
    run = make_run(tmp_path / "r", "[red]CE[/red]", [{"ece": 0.04}])
    scalings = {"vector": measures(ece=0.03), "isotonic": measures(ece=0.02)}
    intervals = {"intervals": {"plain": {"ece": [0.031, 0.049]}, "vector": {}}}
    change_rows(run, kinds=scalings, **intervals, shift=SHIFT, ood={"mean": OOD_CELL})
    console = Console(width=110, file=io.StringIO(), record=True)
    for table in details(load_methods([run])):
        print_table(table, console)
    lines = console.export_text().splitlines()
    assert lines[0].strip() == "Post-hoc calibration"
    cells = {
        line.split("  ")[0].strip(): line.split()[-6:] for line in reversed(lines) if line.strip()
    }
    half = ["50.00", "50.00", "0.500", "0.500"]  # AECE, cwECE, NLL, Brier
    text = " ".join(" ".join(lines).split())
    assert " ".join(["[red]CE[/red] 50.00 4.00", *half, "[3.10, 4.90]"]) in text
    assert cells["[red]CE[/red] + temperature scaling"] == ["50.00", "2.00", *half]
    assert cells["[red]CE[/red] + vector scaling"] == ["50.00", "3.00", *half]
    assert cells["[red]CE[/red] + isotonic regression"] == ["50.00", "2.00", *half]
    assert "over seeds (1), 15 bins" in text and "In brackets 95 % bootstrap" in text
    assert "[red]CE[/red] 70.00 12.00 8.00 1.000 0.400" in text
    assert "mean over sets 91.00 40.00 92.00 38.00" in text


def test_a_table_on_a_narrow_screen_cuts_no_name_and_no_number(tmp_path: Path):
    name = "CSM + FeDLaS + MaC-Cal"
    run = make_run(tmp_path / "r", name, [{"ece": 0.04}, {"ece": 0.06}])
    console = Console(width=40, file=io.StringIO(), record=True)
    print_table(overview(load_methods([run])), console)
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and "5.00±1.41" in text
    assert set(name.split()) <= set(text.split())


def test_an_overview_as_markdown(tmp_path: Path):
    run = make_run(tmp_path / "r", "CE | x", [{"ece": 0.04}, {"ece": 0.06}])
    (method,) = load_methods([run])
    table = overview([method])
    head, _, line = (" ".join(line.split()) for line in as_markdown(table).splitlines())
    assert head == "| method | Acc. % | ECE % | ECE + TS % | NLL | NLL + TS |"
    nll = "0.500 ± 0.000"
    assert line == f"| CE \\| x | 50.00 ± 0.00 | 5.00 ± 1.41 | 2.50 ± 0.71 | {nll} | {nll} |"
    assert table.note.endswith("over seeds (2); TS: after temperature scaling; ECE: 15 bins")
    other = overview([method, replace(method, data="of other images")])
    assert other.note.endswith("; methods on different images do not compare")


def test_improvement_is_the_fraction_by_which_a_proper_score_falls(tmp_path: Path):
    run = make_run(tmp_path / "r", "CE", [{"nll": 0.4}, {"nll": 0.8}])
    change_rows(run, kinds={"sms": measures(nll=0.3, brier=0.6)})
    table = improvements(load_methods([run]), ["scaled", "sms"])
    rows = {row.label: [cell.text for cell in row.cells] for row in table.rows}
    # NLL: 1 - 0.3/0.4 and 1 - 0.3/0.8; Brier 1 - 0.6/0.5, which is worse.
    assert rows["CE + SMS"] == [
        "43.75 \N{PLUS-MINUS SIGN} 26.52",
        "\N{MINUS SIGN}20.00 \N{PLUS-MINUS SIGN} 0.00",
    ]


def test_conformal_sets_are_told_by_score(tmp_path: Path):
    run = make_run(tmp_path / "r", "CE", [{}, {}])
    change_rows(run, conformal={s: {"coverage": 0.9, "size": 1.5} for s in ("thr", "aps", "raps")})
    table = next(t for t in details(load_methods([run])) if t.title == "Conformal sets")
    assert [row.label for row in table.rows] == ["CE, THR", "CE, APS", "CE, RAPS"]
    assert [cell.text.split()[0] for cell in table.rows[0].cells] == ["90.00", "1.500"]
