"""Tables of handmade results: every value is worked out by hand."""

import csv
import gzip
import io
import json

import pandas
import pytest
from PIL import Image
from scipy.stats import ttest_ind

from semix.calib.metrics import calibration_metrics
from semix.calib.replicates import interval
from semix.calib.study import GridChoice, cells_of
from semix.calib.study_jobs import note_failure
from semix.calib.study_mixed import MIXED_MEASURES
from semix.calib.study_results import make_tables, read_results, select_combination
from semix.calib.study_tables import (
    as_csv,
    latex_document,
    markdown_document,
    shown_tables,
    split_by_status,
    table_records,
    value_frame,
    write_study,
)
from semix.data.errors import InputError
from tests.calib.measured import SHIFT, random_predictions, write_run

ECE = {"ce": [0.10, 0.20, 0.30], "ls": [0.08, 0.16, 0.27], "mac": [0.10, 0.20, 0.30]}
ACCURACY = {"ce": [0.5, 0.6, 0.7], "ls": [0.4, 0.6, 0.5], "mac": [0.5, 0.6, 0.7]}
CALIBRATION = {"adaptive_ece": 0.2, "classwise_ece": 0.02, "brier": 0.5}  # the same of all methods


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
    test = rows["ls"]["tests"]["ece"]  # differences -0.02, -0.04, -0.03
    assert (test["n"], test["over"]) == (3, "seeds")
    assert [test[key] for key in ("change", "low", "high")] == pytest.approx([-0.03, -0.04, -0.02])
    assert test["p"] == pytest.approx(ttest_ind(ECE["ls"], ECE["ce"], equal_var=False).pvalue)
    # The head's are those of CE, with which it shares its mean: p = 1.
    assert [rows[name]["tests"]["ece"]["p_holm"] for name in ("CE + TS", "CE + MaC-Cal")] == [
        pytest.approx(3 * rows["CE + TS"]["tests"]["ece"]["p"]),
        1.0,
    ]
    assert rows["CE"]["tests"] == {}


def test_an_ensemble_is_a_row_of_one_unit_per_replicate(make_study, tmp_path):
    study = make_study(
        "methods.ce.post_hoc={CE together: ensemble}", "base.evaluation.ensemble=true"
    )
    cells = write_all(study, tmp_path)
    (ce,) = [cell for cell in cells if cell.method == "ce"]
    path = ce.run(tmp_path) / "evaluation.json"
    evaluation = json.loads(path.read_text())
    row = {**evaluation["rows"][0], "seed": None}
    row["kinds"] = {kind: {**values, "ece": 0.05} for kind, values in row["kinds"].items()}
    row["logits"] = "ensemble/logits-base.safetensors"
    path.write_text(json.dumps({**evaluation, "rows": [*evaluation["rows"], row]}))
    rows = rows_of(study, tmp_path)
    assert rows["CE"]["units"] == 3
    assert rows["CE together"]["units"] == 1
    assert rows["CE together"]["complete"]
    assert rows["CE together"]["summary"]["ece"] == {"mean": 0.05, "sd": None}
    assert rows["CE together"]["tests"]["ece"]["change"] == pytest.approx(0.05 - 0.2)
    lines = value_frame(tables_of(study, tmp_path))
    assert set(lines[lines.row == "CE together"].kind) == {"plain", "scaled"}


def test_a_choice_may_be_calibrated(make_study, tmp_path):
    study = make_study(
        "methods.ls.grid={a: {one: {epochs: 1}, two: {epochs: 2}}}",
        "methods.ls.chosen={best: {by: nll}, best + TS: {by: nll, kind: scaled}}",
    )
    write_all(study, tmp_path)
    rows = rows_of(study, tmp_path)
    assert rows["best + TS"]["chosen"] == rows["best"]["chosen"]
    assert rows["best"]["summary"]["nll"]["mean"] == 2.0
    assert rows["best + TS"]["summary"]["nll"]["mean"] == 0.5


def test_the_mean_rank_is_over_datasets_and_measures(make_study, tmp_path):
    study = make_study('datasets={"one": {}, "two": {}}')
    write_all(study, tmp_path)
    # Of three: ECE 2.5, 1, 2.5; NLL 1, 2.5, 2.5; three more measures are equal for all, 2 each.
    expected = {"CE": 9.5 / 5, "ls": 9.5 / 5, "CE + MaC-Cal": 11 / 5}
    for table in tables_of(study, tmp_path):
        assert {row.method.label: row.mean_rank for row in table.rows} == pytest.approx(expected)


def test_validation_metrics_are_measured_from_the_logits(make_study, tmp_path):
    study = make_study()
    write_all(study, tmp_path)
    expected = calibration_metrics(*random_predictions(2)).as_dict()
    row = rows_of(study, tmp_path, "validation")["ls"]
    (table,) = tables_of(study, tmp_path, "validation")
    ls = next(row for row in table.rows if row.label == "ls")
    assert {k: v[0, None, 2] for k, v in ls.values.items()} == pytest.approx(
        {key: expected[key] for key in ls.values}
    )
    assert "ece_scaled" not in row["summary"]
    text = markdown_document(study, tables_of(study, tmp_path, "validation"), missing={})
    assert text.startswith("# a study: validation images\n")
    assert "## digits, 50 validation images" in text


def test_an_incomplete_study_says_what_is_missing(make_study, tmp_path):
    study = make_study()
    cells = write_all(study, tmp_path, skip=["digits/mac", "digits/ls"])
    write_run(cells[1], tmp_path, {0: {"plain": {"ece": 0.0}}, 2: {}})
    note_failure(cells[2].run(tmp_path), "it *broke*", last_lines=[])
    missing = split_by_status(cells, tmp_path)[1]
    assert missing == {"digits/ls": "not run yet", "digits/mac": "it *broke*"}
    rows = rows_of(study, tmp_path)
    assert [row["complete"] for row in rows.values()] == [True, False, False]
    assert [row["rank"] for row in rows.values()] == [1, None, None]
    assert rows["ls"]["tests"]["ece"]["n"] == 2
    assert rows["CE + MaC-Cal"]["summary"]["ece"] is None
    tables = tables_of(study, tmp_path)
    text = markdown_document(study, tables, missing=missing)
    assert "**Incomplete.**" in text
    assert "- digits/mac: it \\*broke\\*" in text
    assert "| ls (n = 2) |" in text
    assert "**20.00**" not in text  # no best where one row alone has every seed
    assert "digits/mac: it *broke*" in latex_document(study, tables, missing=missing)


def test_a_measured_cell_counts_also_if_a_failure_is_still_noted(make_study, tmp_path):
    study = make_study()
    cells = write_all(study, tmp_path)
    before = rows_of(study, tmp_path)
    note_failure(cells[1].run(tmp_path), "killed after it was measured", last_lines=[])
    assert split_by_status(cells, tmp_path)[1] == {}
    assert rows_of(study, tmp_path) == before


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
    assert cells[8] == "**0.500** ± 0.000"  # as the others: equal values share the mark
    latex = latex_document(study, tables, missing={})
    assert r"\section*{50 \% \& more\_}" in latex
    assert r"LS \$x\$ \textbar{} \textless{}b\textgreater{} & 50.00 $\pm$ 10.00" in latex
    assert r"& \textbf{17.00} $\pm$ 9.54 &" in latex


def test_a_row_that_lacks_seeds_is_never_the_best(make_study, tmp_path):
    study = make_study()
    cells = write_all(study, tmp_path, skip=["digits/ls"])
    write_run(cells[1], tmp_path, {0: {"plain": {"ece": 0.2}}})  # the mean of both others
    (table,) = tables_of(study, tmp_path)
    assert [row.cells[1].best for row in shown_tables(table)[0].rows] == [True, False, True]


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


def test_latex_has_the_tables_of_the_markdown(make_study, tmp_path):
    study = make_study()
    cells = write_all(study, tmp_path)
    write_run(cells[1], tmp_path, {seed: {} for seed in (0, 1, 2)}, shift=SHIFT)
    keys = {"dataset": "digits", "build": "random noise", "split": 0, "draw": 0}
    frame = pandas.DataFrame([keys | dict.fromkeys(MIXED_MEASURES, 0.5)])
    tables = tables_of(study, tmp_path)
    markdown = markdown_document(study, tables, missing={}, mixed=frame)
    latex = latex_document(study, tables, missing={}, mixed=frame)
    assert latex.count(r"\begin{tabular}") == markdown.count("\n|:-") > 4
    assert "digits: Corrupted test images and OOD images." in latex
    assert "digits: Relative decrease of proper scores by post-hoc calibration." in latex
    assert "Mixed images. Means over splits and draws" in latex and "random noise" in latex


def test_csv_holds_full_precision(make_study, tmp_path):
    study = make_study()
    write_all(study, tmp_path)
    lines = list(csv.DictReader(io.StringIO(as_csv(table_records(tables_of(study, tmp_path))))))
    assert [line["run"] for line in lines] == ["digits/ce", "digits/ls", "digits/mac"]
    ls = lines[1]
    assert float(ls["ece"]) == sum(ECE["ls"]) / 3
    assert float(ls["ece_change"]) == pytest.approx(-0.03)
    assert (ls["ece_over"], ls["bins"], lines[0]["ece_p"]) == ("seeds", "15", "")


def test_a_method_named_as_a_formula_is_text_in_every_table_for_spreadsheets(make_study, tmp_path):
    study = make_study("methods.ce.name='=1+1'")
    cells = cells_of(study)
    for cell in cells:
        write_run(cell, tmp_path, {0: {}, 1: {}, 2: {}})
    write_study(study, cells, tmp_path)
    files = {name: (tmp_path / name).read_text() for name in ("study.csv", "values.csv")}
    files["resamples.csv.gz"] = gzip.decompress(
        (tmp_path / "resamples.csv.gz").read_bytes()
    ).decode()
    for name, text in files.items():
        lines = [line for line in text.splitlines() if "=1+1" in line]
        assert all("'=1+1" in line for line in lines), name
        assert name == "resamples.csv.gz" or lines


def test_a_seed_measured_with_other_settings_counts_as_missing(make_study, tmp_path):
    write_all(make_study(), tmp_path)
    other = make_study("base.evaluation.bins=10")
    assert len(split_by_status(cells_of(other), tmp_path)[1]) == 3
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
    names = [f"study.{form}" for form in ("csv", "json", "md", "tex")]
    names = ["resamples.csv.gz", "study-validation.md", *names, "values.csv"]
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


GRID = [
    "seeds=[0, 1]",
    "splits=[3, 4]",
    "methods.ls.grid={smoothing: {s 0.1: {loss.smoothing: 0.1}, s 0.2: {loss.smoothing: 0.2}}}",
    "methods.ls.chosen={LS by NLL: {by: nll}, LS kept: {by: ece, within: 0.01}}",
    'contrasts=[["LS by NLL", "ls (s 0.1)"]]',
]


def test_every_replicate_chooses_its_own_combination(make_study, tmp_path, monkeypatch):
    study = make_study(*GRID)
    nll = {(3, "s-0-1"): 1.0, (3, "s-0-2"): 2.0, (4, "s-0-1"): 2.0, (4, "s-0-2"): 1.5}
    for cell in cells_of(study):
        value = nll.get((cell.split, cell.point), 3.0)
        write_run(cell, tmp_path, {seed: {"plain": {"nll": value}} for seed in (0, 1)})
    monkeypatch.setattr(  # as on the test images, whose values are handmade
        "semix.calib.results.StageResult.on_validation", property(lambda self: self.kinds["plain"])
    )
    (table,) = tables_of(study, tmp_path)
    rows = {row.label: row for row in table.rows}
    assert list(rows) == ["CE", "ls (s 0.1)", "ls (s 0.2)", "LS by NLL", "LS kept", "CE + MaC-Cal"]
    by_nll = rows["LS by NLL"]
    assert by_nll.chosen == {(3, None): "s-0-1", (4, None): "s-0-2"}
    assert set(by_nll.values["nll"].items()) == {
        ((split, None, seed), mean) for split, mean in ((3, 1.0), (4, 1.5)) for seed in (0, 1)
    }
    summary = table_records([table])["digits"]["rows"][3]["summary"]["nll"]
    assert summary == pytest.approx({"mean": 1.25, "sd": 0.125**0.5})  # of 1 and 1.5, the splits
    against = table.contrasts["LS by NLL", "ls (s 0.1)"]["nll"]
    assert (against.change, against.low, against.high) == (-0.25, -0.5, 0.0)
    lines = value_frame([table]).query("row == 'LS by NLL' and kind == 'plain' and split == 4")
    assert (list(lines["point"]), list(lines["nll"])) == (["s-0-2"] * 2, [1.5] * 2)
    text = markdown_document(study, [table], missing={})
    assert "- LS by NLL: s-0-1 (1), s-0-2 (1)" in text
    assert "Means over 2 splits of the real images" in text
    few = "no significant difference; 2 splits are too few to say of NLL."
    assert f"- LS by NLL against CE: {few}" in text  # -1.75 on one, -1.5 on the other
    assert "- LS by NLL against ls (s 0.1): no significant difference.\n" in text  # 0 on one


def test_what_failed_is_not_chosen_and_what_is_not_measured_yet_is_waited_for(make_study, tmp_path):
    study = make_study(*GRID)
    cells = {cell.name: cell for cell in cells_of(study)}
    late = cells.pop("digits-split3/ls+s-0-1")
    for cell in cells.values():
        write_run(cell, tmp_path, {0: {}, 1: {}})
    (table,) = tables_of(study, tmp_path)
    selected = next(row for row in table.rows if row.label == "LS by NLL")
    assert (list(selected.chosen), selected.complete) == ([(4, None)], False)
    note_failure(late.run(tmp_path), "it diverged", last_lines=[])
    (table,) = tables_of(study, tmp_path)
    rows = {row.label: row for row in table.rows}
    assert rows["LS by NLL"].chosen[3, None] == "s-0-2"
    assert (rows["LS by NLL"].complete, rows["ls (s 0.1)"].complete) == (True, False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"by": "ece"}, "bold"),
        ({"by": "accuracy"}, "shy"),
        ({"by": "ece", "within": 0.01}, "shy"),
        ({"by": "nll", "within": 0.2}, "mild"),
        ({"by": "ece", "within": 0.0}, "shy"),  # all lose more: the most accurate
        ({"match": "CE"}, "mild"),
    ],
)
def test_what_a_choice_takes(choice, expected):
    means = {
        "bold": {"accuracy": 0.80, "ece": 0.01, "nll": 0.5, "confidence": 0.7},
        "mild": {"accuracy": 0.85, "ece": 0.02, "nll": 0.4, "confidence": 0.8},
        "shy": {"accuracy": 0.895, "ece": 0.03, "nll": 0.6, "confidence": 0.9},
    }
    reference = {"accuracy": 0.90, "confidence": 0.83}
    assert select_combination(GridChoice(**choice), means, reference) == expected


def test_every_interval_can_be_computed_from_the_resamples(make_study, tmp_path):
    study = make_study("seeds=[0, 1, 2]", "splits=[0, 1, 2]")
    cells = cells_of(study)
    for number, cell in enumerate(cells):
        resamples = {
            kind: {
                m: [0.01 * (number + k) for k in range(4)]
                for m in ("accuracy", "ece", "nll", "brier")
            }
            for kind in ("plain", "scaled")
        }
        values = {s: {"plain": {"ece": ECE[cell.method][s] + 0.02 * cell.split}} for s in (0, 1, 2)}
        write_run(cell, tmp_path, values, resamples=resamples)
    write_study(study, cells, tmp_path)
    frame = pandas.read_csv(tmp_path / "resamples.csv.gz")
    assert list(frame.columns[:7]) == ["dataset", "row", "point", "kind", "split", "draw", "seed"]
    assert len(frame) == 3 * 9 * 2 * 4
    record = json.loads((tmp_path / "study.json").read_text())
    rows = {row["method"]: row for row in record["test"]["digits"]["rows"]}
    ece = frame.query("kind == 'plain'").set_index(["row", "split", "seed", "set"])["ece"]
    changes = (ece["ls"] - ece["CE"]).to_numpy().reshape(3, 1, 3, 4)
    test = rows["ls"]["tests"]["ece"]
    assert interval(changes) == pytest.approx((test["low"], test["high"]), abs=1e-6)


def test_nothing_measured_is_a_table_too(make_study, tmp_path):
    study = make_study()
    record = write_study(study, cells_of(study), tmp_path)
    assert len(record["missing"]) == 3
    assert record["figures"] == []
    line = next(
        line for line in (tmp_path / "study.md").read_text().splitlines() if "CE (n" in line
    )
    assert line.split() == ["|", "CE", "(n", "=", "0)", *["|", "\N{EN DASH}"] * 12, "|"]
