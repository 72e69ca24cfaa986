"""Tables of handmade results: every figure is worked out by hand."""

import csv
import io
import json

import pytest
from PIL import Image

from calib.metrics import calibration_metrics
from calib.study import cells_of, note_failure
from calib.study_tables import (
    as_csv,
    latex_document,
    make_tables,
    markdown_document,
    measure_table,
    read_results,
    table_records,
    what_ran,
    write_study,
)
from data.errors import InputError
from tests.calib.measured import random_predictions, write_run

ECE = {"ce": [0.10, 0.20, 0.30], "ls": [0.08, 0.16, 0.27], "mac": [0.10, 0.20, 0.30]}
ACCURACY = {"ce": [0.5, 0.6, 0.7], "ls": [0.4, 0.6, 0.5], "mac": [0.5, 0.6, 0.7]}
CALIBRATION = {"adaptive_ece": 0.2, "classwise_ece": 0.02, "brier": 0.5}  # alike in all


def write_all(study, out, *, skip=()):
    cells = cells_of(study)
    for cell in cells:
        if cell.name in skip:
            continue
        measured = {
            seed: {
                "plain": {
                    **CALIBRATION,
                    "ece": ECE[cell.method][seed],
                    "accuracy": ACCURACY[cell.method][seed],
                    "nll": 1.0 if cell.method == "ce" else 2.0,
                },
                "scaled": {"ece": 0.01 * (seed + 1), "nll": 0.5},
            }
            for seed in study.seeds
        }
        write_run(cell, out, measured)
    return cells


def tables_of(study, out, split="test"):
    return make_tables(study, read_results(cells_of(study), out), split)


def rows_of(study, out, split="test"):
    (record, *_) = table_records(tables_of(study, out, split)).values()
    return {row["method"]: row for row in record["rows"]}


def test_means_deviations_ranks_and_tests_are_those_of_the_seeds(make_study, tmp_path):
    study = make_study("methods.ce.post_hoc={CE + TS: scaled}")
    write_all(study, tmp_path)
    rows = rows_of(study, tmp_path)
    assert list(rows) == ["CE", "CE + TS", "ls", "CE + MaC-Cal"]
    assert rows["CE"]["summary"]["ece"] == pytest.approx({"mean": 0.2, "sd": 0.1})
    assert rows["CE"]["summary"]["ece_scaled"] == pytest.approx({"mean": 0.02, "sd": 0.01})
    assert rows["CE + TS"]["summary"]["ece"] == pytest.approx({"mean": 0.02, "sd": 0.01})
    assert rows["CE + TS"]["summary"]["ece_scaled"] is None
    # By ECE: CE + TS 0.02, ls 0.17, then CE and its head with 0.2 each.
    assert [row["rank"] for row in rows.values()] == [3.5, 1, 2, 3.5]
    test = rows["ls"]["tests"]["ece"]  # differences -0.02, -0.04, -0.03: t = -3 sqrt(3)
    assert (test["better"], test["shared"]) == (3, 3)
    assert test["change"] == pytest.approx(-0.03)
    assert test["p"] == pytest.approx(1 - (27 / 29) ** 0.5)
    # CE + TS differs by -0.09, -0.18, -0.27, t = -2 sqrt(3); the head's differences are all 0.
    assert rows["CE + TS"]["tests"]["ece"]["p"] == pytest.approx(1 - (12 / 14) ** 0.5)
    assert rows["CE + MaC-Cal"]["tests"]["ece"]["p"] is None
    assert test["p_holm"] == pytest.approx(2 * test["p"])
    assert rows["ls"]["tests"]["accuracy"]["better"] == 0
    assert rows["CE"]["tests"] == {}


def test_the_mean_rank_is_over_datasets_and_measures(make_study, tmp_path):
    study = make_study('datasets={"one": {}, "two": {}}')
    write_all(study, tmp_path)
    # Of three: ECE 2.5, 1, 2.5; NLL 1, 2.5, 2.5; three more measures are alike in all, 2 each.
    expected = {"CE": 9.5 / 5, "ls": 9.5 / 5, "CE + MaC-Cal": 11 / 5}
    for table in tables_of(study, tmp_path):
        assert {row.method.label: row.mean_rank for row in table.rows} == pytest.approx(expected)


def test_validation_figures_are_measured_from_the_logits(make_study, tmp_path):
    study = make_study()
    write_all(study, tmp_path)
    expected = calibration_metrics(*random_predictions(2)).as_dict()
    row = rows_of(study, tmp_path, "validation")["ls"]
    assert row["seeds"]["2"] == pytest.approx(expected)
    assert row["scaled"] == {}
    text = markdown_document(study, tables_of(study, tmp_path, "validation"), missing={})
    assert text.startswith("# a study: validation images\n")
    assert "## digits, 50 validation images" in text


def test_an_incomplete_study_says_what_is_missing(make_study, tmp_path):
    study = make_study()
    cells = write_all(study, tmp_path, skip=["digits/mac", "digits/ls"])
    write_run(cells[1], tmp_path, {0: {"plain": {"ece": 0.0}}, 2: {}})
    note_failure(cells[2].run(tmp_path), "it *broke*", last_lines=[])
    missing = what_ran(cells, tmp_path)[1]
    assert missing == {"digits/ls": "not run yet", "digits/mac": "it *broke*"}
    rows = rows_of(study, tmp_path)
    assert [row["complete"] for row in rows.values()] == [True, False, False]
    assert [row["rank"] for row in rows.values()] == [1, None, None]
    assert rows["ls"]["tests"]["ece"]["shared"] == 2
    assert rows["CE + MaC-Cal"]["summary"]["ece"] is None
    tables = tables_of(study, tmp_path)
    text = markdown_document(study, tables, missing=missing)
    assert "**Incomplete.**" in text
    assert "- digits/mac: it \\*broke\\*" in text
    assert "| ls (n = 2) |" in text
    assert "**20.00**" not in text  # no best where one row alone has every seed
    assert "digits/mac: it *broke*" in latex_document(study, tables, missing=missing)


def test_the_best_is_bold_in_markdown_and_latex(make_study, tmp_path):
    study = make_study(
        "name=50 % & more_", "methods.ls.name=LS $x$ | <b>", "description=First.\n\n<script>"
    )
    write_all(study, tmp_path)
    tables = tables_of(study, tmp_path)
    markdown = markdown_document(study, tables, missing={})
    line = next(line for line in markdown.splitlines() if line.startswith(r"| LS $x$ \| \<b\> |"))
    assert markdown.startswith("# 50 % \\& more\\_: test images\n\nFirst. \\<script\\>\n\n")
    cells = [cell.strip() for cell in line.replace(r"\|", "").split(" | ")]
    assert cells[1:3] == ["50.00 ± 10.00", "**17.00** ± 9.54"]
    assert cells[8] == "**0.500** ± 0.000"  # as the others: equal figures share the mark
    latex = latex_document(study, tables, missing={})
    assert r"\section*{50 \% \& more\_}" in latex
    assert r"LS \$x\$ \textbar{} \textless{}b\textgreater{} & 50.00 $\pm$ 10.00" in latex
    assert r"& \textbf{17.00} $\pm$ 9.54 &" in latex


def test_a_row_that_lacks_seeds_is_never_the_best(make_study, tmp_path):
    study = make_study()
    cells = write_all(study, tmp_path, skip=["digits/ls"])
    write_run(cells[1], tmp_path, {0: {"plain": {"ece": 0.2}}})  # the mean of both others
    (table,) = tables_of(study, tmp_path)
    assert [cells[1].best for _, cells in measure_table(table).rows] == [True, False, True]


def test_the_latex_is_well_formed(make_study, tmp_path):
    study = make_study()
    write_all(study, tmp_path, skip=["digits/mac"])
    latex = latex_document(study, tables_of(study, tmp_path), missing={"digits/mac": "not run yet"})
    for table in latex.split(r"\begin{tabular}")[1:]:
        columns, _, body = table.split(r"\end{tabular}")[0].removeprefix("{").partition("}")
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(lines) >= 2
        assert all(line.count(" & ") == len(columns) - 1 for line in lines)
    for name in ("document", "table", "tabular"):
        assert latex.count(rf"\begin{{{name}}}") == latex.count(rf"\end{{{name}}}") > 0
    assert latex.count("{") == latex.count("}")


def test_csv_holds_full_precision(make_study, tmp_path):
    study = make_study()
    write_all(study, tmp_path)
    lines = list(csv.DictReader(io.StringIO(as_csv(table_records(tables_of(study, tmp_path))))))
    assert [line["run"] for line in lines] == ["digits/ce", "digits/ls", "digits/mac"]
    ls = lines[1]
    assert float(ls["ece"]) == sum(ECE["ls"]) / 3
    assert float(ls["ece_change"]) == pytest.approx(-0.03)
    assert (ls["ece_better"], ls["bins"], lines[0]["ece_p"]) == ("3", "15", "")


def test_a_seed_that_was_measured_otherwise_is_not_measured(make_study, tmp_path):
    write_all(make_study(), tmp_path)
    other = make_study("base.evaluation.bins=10")
    assert len(what_ran(cells_of(other), tmp_path)[1]) == 3
    assert all(row["summary"]["ece"] is None for row in rows_of(other, tmp_path).values())


def test_a_run_of_other_settings_is_refused(make_study, tmp_path):
    study = make_study()
    write_all(study, tmp_path)
    other = make_study("base.epochs=2")
    with pytest.raises(InputError, match=r"digits/ce: was begun with other settings \(epochs: 1"):
        read_results(cells_of(other), tmp_path)


FIGURES = [f"figures/{kind}-digits.png" for kind in ("ece", "accuracy-ece", "reliability")]


def test_every_file_is_written_and_the_document_shows_the_figures(make_study, tmp_path):
    study = make_study()
    cells = cells_of(study)
    for cell in cells:
        write_run(cell, tmp_path, {0: {}, 1: {}, 2: {"plain": {"ece": 0.5}}})
    record = write_study(study, cells, tmp_path)
    names = ["study-validation.md", "study.csv", "study.json", "study.md", "study.tex"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == names
    assert json.loads((tmp_path / "study.json").read_text()) == record
    assert record["missing"] == {}
    assert record["config"]["methods"]["mac"]["name"] == "CE + MaC-Cal"
    assert record["runs"]["digits/ls"] == {"digest": "d", "seconds": 90.0}
    assert record["versions"] == {"torch": "9.1"}
    assert record["figures"] == FIGURES
    text = (tmp_path / "study.md").read_text()
    assert "Training and measuring 3 runs took 4.5 minutes, with torch 9.1." in text
    for name in FIGURES:
        assert f"![]({name})" in text
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
            assert min(image.size) > 150


def test_nothing_measured_is_a_table_too(make_study, tmp_path):
    study = make_study()
    record = write_study(study, cells_of(study), tmp_path)
    assert len(record["missing"]) == 3
    assert record["figures"] == []
    line = next(
        line for line in (tmp_path / "study.md").read_text().splitlines() if "CE (n" in line
    )
    assert line.split() == ["|", "CE", "(n", "=", "0)", *["|", "\N{EN DASH}"] * 12, "|"]
