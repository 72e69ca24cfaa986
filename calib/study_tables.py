"""Write the tables of a study in all formats, and files with all values behind them."""

import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from semix.calib.calibrators import PLAIN
from semix.calib.replicates import COMPARED_MEASURES, Comparison, Unit
from semix.calib.results import StageResult, merge_versions, significant_change
from semix.calib.run_folder import EVALUATION, Evaluation, is_measured
from semix.calib.shown_measures import MEASURE, RANKED, SummaryRecord
from semix.calib.study import Cell, StudyConfig
from semix.calib.study_jobs import failure_of
from semix.calib.study_mixed import MIXED_NOTE, mixed_table, read_mixed
from semix.calib.study_results import TESTED, DatasetTable, StudyRow, make_tables, read_results
from semix.calib.tables import (
    DASH,
    Column,
    Table,
    TableCell,
    TableRow,
    as_latex,
    as_markdown,
    change_cell,
    column_key,
    csv_text,
    improvements,
    latex_text,
)
from semix.data.files import read_json, write_atomically, write_json
from semix.data.printable import markdown_text

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = 2
SHOWN_CALIBRATORS = ("scaled", "sms")  # post-hoc calibration whose gain in proper scores is shown
STUDY_JSON = "study.json"
VALUES_CSV, RESAMPLES_CSV = "values.csv", "resamples.csv.gz"
NOT_RUN = "not run yet"
FIGURES_FOLDER = "figures"
TESTED_KEYS = {column.key for column in TESTED}
LATEX_PREAMBLE = r"""\documentclass{article}
\usepackage[a4paper,landscape,margin=15mm]{geometry}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\begin{document}"""


def write_study(study: StudyConfig, cells: Sequence[Cell], out: Path) -> dict[str, object]:
    """Write study.md, study-validation.md, study.csv, study.tex, study.json and figures.

    values.csv has every measure of every seed, also of combinations that were not chosen.
    resamples.csv.gz has the tested measures on bootstrap resamples. From these two, every interval
    and p-value of the tables can be computed again.

    Args:
        cells: all cells of the study; the tables list those that are not measured.
    Returns:
        The content of study.json.
    Raises:
        InputError: see `read_results`.
    """
    results = read_results(cells, out)
    finished, missing = split_by_status(cells, out)
    test, validation = (make_tables(study, results, split) for split in ("test", "validation"))
    records = {"test": table_records(test), "validation": table_records(validation)}
    figures = draw_figures(test, out)
    versions = merge_versions(evaluation["versions"] for evaluation in finished.values())
    facts, mixed = _summary_of_runs(finished, versions), read_mixed(out)
    texts = {
        "study.md": markdown_document(
            study, test, missing=missing, figures=figures, facts=facts, mixed=mixed
        ),
        "study-validation.md": markdown_document(study, validation, missing=missing, facts=facts),
        "study.csv": as_csv(records["test"]),
        "study.tex": latex_document(study, test, missing=missing, mixed=mixed),
        VALUES_CSV: csv_text(value_frame(test), float_format="%.7g"),
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    lines = csv_text(resample_frame(test), float_format="%.6g")
    write_atomically(out / RESAMPLES_CSV, gzip.compress(lines.encode(), mtime=0))
    record: dict[str, object] = {
        "schema": SCHEMA,
        "name": study.name,
        "seeds": list(study.seeds),
        "splits": study.splits and list(study.splits),
        "draws": study.draws and list(study.draws),
        "missing": missing,
        **records,
        "runs": {
            name: {"digest": evaluation["digest"], "seconds": evaluation["seconds"]}
            for name, evaluation in finished.items()
        },
        "versions": versions,
        "figures": figures,
        "config": study.model_dump(mode="json"),
    }
    write_json(out / STUDY_JSON, record)
    return record


def split_by_status(
    cells: Sequence[Cell], out: Path
) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """Evaluations of the measured cells; for the other cells, the reasons why they have none."""
    finished, missing = {}, {}
    for cell in cells:
        run = cell.run(out)
        if is_measured(cell.config, run):
            finished[cell.name] = read_json(run / EVALUATION)
        else:
            missing[cell.name] = failure_of(run) or NOT_RUN
    return finished, missing


def draw_figures(tables: Sequence[DatasetTable], out: Path) -> list[str]:
    """Draw the figures of each dataset that has results; return their paths below `out`."""
    from semix.calib.figures import write_figures

    names = []
    for table in tables:
        # Of a grid only chosen combinations, because a figure of dozens of rows is unreadable.
        shown = [row for row in table.rows if row.config.choice or row.config.points == ("",)]
        measured = [row.method for row in shown if row.units]
        if measured:
            names += write_figures(measured, out / FIGURES_FOLDER, dataset=table.dataset)
    return [f"{FIGURES_FOLDER}/{name}" for name in names]


# Tables


def shown_tables(table: DatasetTable) -> list[Table]:
    """All tables of a dataset, as far as it was measured: measures first, then comparisons."""
    shifted = [row for row in table.rows if any(row.values[c.key] for c in table.shifted_columns)]
    tables = [
        _means(table, "", table.columns, table.rows, with_ranks=True),
        _means(table, "Corrupted test images and OOD images", table.shifted_columns, shifted),
    ]
    if table.split == "test":  # on validation images calibrators are fitted
        gains = improvements([row.method for row in table.rows], SHOWN_CALIBRATORS)
        title = "Relative decrease of proper scores by post-hoc calibration"
        tables.append(replace(gains, title=title, note=""))
    tables += [
        _changes(
            f"Against {table.baseline}",
            table.tested_columns,
            [(_label(row), row.tests) for row in table.rows],
        ),
        _changes(
            "Further comparisons",
            table.tested_columns,
            [(f"{new} against {old}", tests) for (new, old), tests in table.contrasts.items()],
        ),
    ]
    return [each for each in tables if each.rows]


def _means(
    table: DatasetTable,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[StudyRow],
    *,
    with_ranks: bool = False,
) -> Table:
    """Means and deviations; the best mean of a column is marked, among complete rows."""
    best = {
        column: column.measure.best(
            each.mean for row in table.rows if row.complete and (each := row.summary(column))
        )
        for column in columns
    }

    def cells(row: StudyRow) -> list[TableCell]:
        means = [
            TableCell.of(c.measure, row.summary(c), best[c] if row.complete else None)
            for c in columns
        ]
        ranked = (row.rank, row.mean_rank) if with_ranks else ()
        return means + [TableCell(DASH if rank is None else f"{rank:.3g}") for rank in ranked]

    titles = [column.title for column in columns] + (["rank", "mean rank"] if with_ranks else [])
    return Table(title, "", titles, [TableRow(_label(row), cells(row)) for row in rows])


def _changes(
    title: str, tested: Sequence[Column], rows: Sequence[tuple[str, Mapping[str, Comparison]]]
) -> Table:
    """Changes with their intervals, and p-values, corrected over the rows of this table."""

    def cells(column: Column, test: Comparison | None) -> list[TableCell]:
        if test is None:
            return [TableCell()] * 2
        return [change_cell(test, column.measure), TableCell(_p_values(test))]

    titles = [title for c in tested for title in (f"{c.title} change", "p (Holm)")]
    shown = [
        TableRow(label, [cell for c in tested for cell in cells(c, tests.get(c.key))])
        for label, tests in rows
        if tests
    ]
    note = "Changes with 95 % intervals, and p, uncorrected and Holm-corrected."
    return Table(title, note, titles, shown)


def choice_sentences(table: DatasetTable) -> list[str]:
    """A sentence per row with a choice: the combinations, and how often each was chosen."""
    counted = {row.label: Counter(row.chosen.values()).most_common() for row in table.rows}
    return [
        f"{label}: {', '.join(f'{point} ({times})' for point, times in counts)}"
        for label, counts in counted.items()
        if counts
    ]


def _label(row: StudyRow) -> str:
    """The row's label; if seeds are missing, with the number of measured classifiers."""
    return row.label if row.complete else f"{row.label} (n = {row.units})"


def _p_values(test: Comparison) -> str:
    """p, and in brackets p corrected by Holm's method: `0.012 (0.24)`."""
    shown = ["<0.001" if p is not None and p < 0.001 else p for p in (test.p, test.p_holm)]
    texts = [f"{p:.3f}" if isinstance(p, float) else p for p in shown]
    return DASH if texts[0] is None else f"{texts[0]} ({texts[1]})"


def verdicts(table: DatasetTable) -> list[str]:
    """One sentence per comparison: measures that are better or worse, or why that is not known."""
    rows = [(row.label, table.baseline, row.tests) for row in table.rows if row.tests]
    rows += [(new, old, tests) for (new, old), tests in table.contrasts.items()]
    sentences = []
    for new, old, tests in rows:
        by_verdict: dict[str, list[str]] = {"better in": [], "worse in": []}
        for column in table.tested_columns:
            if (test := tests.get(column.key)) is not None:
                verdict = significant_change(test, column.measure)
                verdict_text = f"{verdict} in" if verdict else test.too_few and f"{test.too_few} of"
                by_verdict.setdefault(verdict_text, []).append(column.title.removesuffix(" %"))
        nonempty = {
            verdict_text: names
            for verdict_text, names in by_verdict.items()
            if verdict_text and names
        }
        blocks = [f"{verdict_text} {', '.join(names)}" for verdict_text, names in nonempty.items()]
        if not (by_verdict["better in"] or by_verdict["worse in"]):
            blocks.insert(0, "no significant difference")
        sentences.append(f"{new} against {old}: {'; '.join(blocks)}.")
    return sentences


# Documents


def markdown_document(
    study: StudyConfig,
    tables: Sequence[DatasetTable],
    *,
    missing: Mapping[str, str],
    figures: Sequence[str] = (),
    facts: str = "",
    mixed: "DataFrame | None" = None,
) -> str:
    """The study as Markdown: missing cells; tables and tests of each dataset.

    Args:
        missing: cells that are not measured, with the reason.
        figures: paths relative to the document's folder.
        facts: a sentence on the runs.
        mixed: measures of the mixed datasets; see `mixed_table`.
    """
    title = f"# {markdown_text(study.name)}: {tables[0].split} images"
    blocks = [title, markdown_text(study.description)]
    if missing:
        lines = [f"- {markdown_text(cell)}: {markdown_text(why)}" for cell, why in missing.items()]
        blocks += ["**Incomplete.** These cells are not measured:", "\n".join(lines)]
    for table in tables:
        images = "" if table.images is None else f", {table.images:,} {table.split} images"
        blocks.append(f"## {markdown_text(table.dataset)}{images}")
        for each in shown_tables(table):
            blocks += [f"{markdown_text(each.title)}:"] if each.title else []
            blocks.append(as_markdown(each))
        if chosen := choice_sentences(table):
            lines = [f"- {markdown_text(line)}" for line in chosen]
            blocks += ["Chosen on validation (number of replicates):", "\n".join(lines)]
        if lines := verdicts(table):
            bullets = [f"- {markdown_text(line)}" for line in lines]
            blocks += ["Significant differences by 95 % intervals:", "\n".join(bullets)]
    if mixed is not None:
        blocks += ["## Mixed images", MIXED_NOTE, as_markdown(mixed_table(mixed))]
    blocks += [legend(study, tables), markdown_text(facts), *(f"![]({path})" for path in figures)]
    return "\n\n".join(part for part in blocks if part) + "\n"


def legend(study: StudyConfig, tables: Sequence[DatasetTable]) -> str:
    """Sentences that explain the tables."""
    bins = sorted({table.bins for table in tables if table.bins is not None})
    baseline = markdown_text(tables[0].baseline)
    ranked = ", ".join(measure.short for measure in RANKED)
    sentences = [
        _replication(study),
        f"Binned errors have {' or '.join(map(str, bins)) or 'no'} bins.",
        "The best mean of a column is bold, among rows that have every seed; bold does not mean"
        " significant. O-ECE + U-ECE = ECE are not marked.",
        f"Rank is by ECE on the dataset, mean rank over datasets and {ranked}; 1 is the best.",
        f"Changes are against {baseline}, in the units of the table, with 95 % intervals by a"
        " hierarchical bootstrap over splits, draws, training seeds and test images; behind them p"
        " of a two-sided t-test, paired over splits, or Welch's over the seeds of one split; none"
        " of fewer than three; and in brackets corrected by Holm's method over the rows of the"
        " table. Corrupted and OOD images are not resampled.",
    ]
    if tables[0].split == "test":
        sentences.append("TS: after temperature scaling on validation images.")
    else:
        sentences.append("Validation images also chose the temperature, and epochs if so set.")
    return " ".join(sentences)


def _replication(study: StudyConfig) -> str:
    seeds = f"training seeds {', '.join(map(str, study.seeds))}"
    if not (study.splits or study.draws):
        return f"Mean ± sample standard deviation over {seeds}."
    units = [f"{len(study.splits)} splits of the real images"] if study.splits else []
    units += [f"{len(study.draws)} draws of mixed images"] if study.draws else []
    return (
        f"Means over {' x '.join(units)} (rows without mixed images have no draws) and {seeds};"
        " ± sample standard deviation of the replicates' means."
    )


def latex_document(
    study: StudyConfig,
    tables: Sequence[DatasetTable],
    *,
    missing: Mapping[str, str],
    mixed: "DataFrame | None" = None,
) -> str:
    """A complete LaTeX document, from which each `tabular` can be copied.

    Args: as of `markdown_document`.
    """
    blocks = [LATEX_PREAMBLE, rf"\section*{{{latex_text(study.name)}}}"]
    if missing:
        cells = "; ".join(f"{latex_text(cell)}: {latex_text(why)}" for cell, why in missing.items())
        blocks.append(rf"\textbf{{Incomplete.}} Not measured: {cells}.")
    for table in tables:
        bins = "" if table.bins is None else f"; {table.bins} bins"
        images = "" if table.images is None else f"{table.images} "
        caption = f"{table.dataset}, {images}{table.split} images{bins}. {_replication(study)}"
        blocks += [
            _floating(
                each, f"{table.dataset}: {each.title}. {each.note}" if each.title else caption
            )
            for each in shown_tables(table)
        ]
    if mixed is not None:
        blocks.append(_floating(mixed_table(mixed), f"Mixed images. {MIXED_NOTE}"))
    return "\n\n".join([*blocks, r"\end{document}"]) + "\n"


def _floating(table: Table, caption: str) -> str:
    lines = (r"\begin{table}[h]", r"\centering", rf"\caption{{{latex_text(caption)}}}")
    body = (r"\resizebox{\linewidth}{!}{%", as_latex(table) + "}", r"\end{table}")
    return "\n".join([*lines, *body])


# Records


class RowRecord(TypedDict):
    """A row of study.json."""

    method: str
    run: str
    kind: str
    complete: bool
    summary: dict[str, SummaryRecord | None]  # by column
    units: int  # number of trained classifiers
    chosen: dict[str, int]  # number of replicates by chosen combination
    rank: float | None
    mean_rank: float | None
    tests: dict[str, dict[str, float | str | None]]  # a `Comparison` by column


class TableRecord(TypedDict):
    """One dataset of study.json."""

    bins: int | None
    images: int | None
    baseline: str
    rows: list[RowRecord]
    contrasts: list[dict[str, object]]


def as_csv(records: Mapping[str, TableRecord]) -> str:
    """`table_records` as CSV, one line per dataset and row; fields are empty if not measured."""
    from pandas import DataFrame

    lines = [
        {"dataset": dataset, **_line(row, table["bins"])}
        for dataset, table in records.items()
        for row in table["rows"]
    ]
    return csv_text(DataFrame(lines, dtype=object))


def _line(row: RowRecord, bins: int | None) -> dict[str, object]:
    line: dict[str, object] = {"method": row["method"], "run": row["run"], "kind": row["kind"]}
    line |= {"units": row["units"], "bins": bins}
    for key, summary in row["summary"].items():
        line |= {key: summary and summary["mean"], f"{key}_sd": summary and summary["sd"]}
    line |= {"rank": row["rank"], "mean_rank": row["mean_rank"]}
    for column, test in row["tests"].items():
        line |= {f"{column}_{key}": value for key, value in test.items()}
    return line


def table_records(tables: Sequence[DatasetTable]) -> dict[str, TableRecord]:
    """Summaries and tests of each row, by dataset; `value_frame` has the single values."""
    return {
        table.dataset: {
            "bins": table.bins,
            "images": table.images,
            "baseline": table.baseline,
            "rows": [_record(table, row) for row in table.rows],
            "contrasts": [
                {"method": new, "against": old, "tests": _tests(tests)}
                for (new, old), tests in table.contrasts.items()
            ],
        }
        for table in tables
    }


def _record(table: DatasetTable, row: StudyRow) -> RowRecord:
    columns = (*table.columns, *table.shifted_columns)
    summaries = {column.key: row.summary(column) for column in columns}
    return {
        "method": row.label,
        "run": f"{table.dataset}/{row.config.method}",
        "kind": row.config.kind,
        "complete": row.complete,
        "summary": {key: each.record() if each else None for key, each in summaries.items()},
        "units": row.units,
        "chosen": dict(Counter(row.chosen.values())),
        "rank": row.rank,
        "mean_rank": row.mean_rank,
        "tests": _tests(row.tests),
    }


def _tests(tests: Mapping[str, Comparison]) -> dict[str, dict[str, float | str | None]]:
    return {key: asdict(test) for key, test in tests.items()}


# All values


def value_frame(tables: Sequence[DatasetTable]) -> "DataFrame":
    """All measures, unrounded: one line per row, kind of calibration and classifier."""
    from pandas import DataFrame

    return DataFrame(
        [
            {
                **key_columns,
                "temperature": result.temperature,
                **result.values[kind, "test"],
                **({} if kind != "plain" else _measures_beside_test(result)),
            }
            for key_columns, row, unit, kind in _units_with_keys(tables)
            if (kind, "test") in (result := row.method.seeds[unit]).values
        ]
    )


def _measures_beside_test(result: StageResult) -> dict[str, float]:
    """Means over corrupted and over OOD images, by the names of their columns."""
    return {
        column_key(key, "" if kind == PLAIN else kind, part): value
        for (kind, part), values in result.values.items()
        if part in ("shift", "ood")
        for key, value in values.items()
    }


def resample_frame(tables: Sequence[DatasetTable]) -> "DataFrame":
    """Tested measures: one line per row, kind of calibration, classifier and bootstrap resample.

    Corrupted and OOD images are not resampled; their measures are the same in every line.
    """
    from pandas import DataFrame

    lines = []
    for key_columns, row, unit, kind in _units_with_keys(tables):
        resamples = {key: row.method.resamples(MEASURE[key], kind) for key in COMPARED_MEASURES}
        resampled_values = zip(
            *(values[unit] for values in resamples.values() if unit in values), strict=True
        )
        shifted = _measures_beside_test(row.method.seeds[unit]) if kind == "plain" else {}
        tested = {key: value for key, value in shifted.items() if key in TESTED_KEYS}
        lines += [
            {**key_columns, "set": number, **dict(zip(resamples, values, strict=True)), **tested}
            for number, values in enumerate(resampled_values)
        ]
    return DataFrame(lines)


def _units_with_keys(
    tables: Sequence[DatasetTable],
) -> Iterator[tuple[dict[str, object], StudyRow, Unit, str]]:
    """Yield the key columns of each line, and its row, unit and kind."""
    for table in tables:
        for row in table.rows:
            kind = row.method.kind
            kinds = (PLAIN, "scaled") if kind == PLAIN else (kind,)
            for unit, kind in product(row.method.seeds, kinds):
                point = row.chosen.get((unit.split, unit.draw)) or row.config.points[0]
                key_columns = {
                    "dataset": table.dataset,
                    "row": row.label,
                    "point": point,
                    "kind": kind,
                }
                yield {**key_columns, **unit._asdict()}, row, unit, kind


def _summary_of_runs(finished: Mapping[str, Evaluation], versions: Mapping[str, str]) -> str:
    if not finished:
        return ""
    minutes = sum(evaluation["seconds"] for evaluation in finished.values()) / 60
    names = ", ".join(f"{library} {version}" for library, version in versions.items())
    return f"Training and measuring {len(finished)} runs took {minutes:.1f} minutes, with {names}."
