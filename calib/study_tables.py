"""What a study found: a table a dataset, with ranks and tests, written in every form."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TypedDict

from calib.results import (
    RANKED,
    TESTED,
    Comparison,
    Measure,
    Method,
    Split,
    Spread,
    Summary,
    compare_all,
    measured_seeds,
    merged_versions,
    ranks,
    shown_in,
)
from calib.run_folder import EVALUATION, Evaluation, is_measured
from calib.study import Cell, StudyConfig, failure_of, row_names
from calib.tables import (
    DASH,
    SCALED,
    Column,
    Table,
    as_latex,
    as_markdown,
    latex_text,
)
from calib.tables import (
    Cell as Shown,
)
from data.files import read_json, write_atomically, write_json
from data.printable import markdown_text

SCHEMA = 1
STUDY = "study.json"
NOT_RUN = "not run yet"
FIGURES = "figures"
LATEX = r"""\documentclass{article}
\usepackage[a4paper,landscape,margin=15mm]{geometry}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\begin{document}"""


def write_study(study: StudyConfig, cells: Sequence[Cell], out: Path) -> dict[str, object]:
    """Write study.md, study-validation.md, study.csv, study.tex, study.json and figures.

    Args:
        cells: all of them, measured or not; the tables say which are not.
    Returns:
        What study.json holds.
    Raises:
        InputError: what `read_results` refuses.
    """
    results = read_results(cells, out)
    finished, missing = what_ran(cells, out)
    test, validation = (make_tables(study, results, split) for split in ("test", "validation"))
    records = {"test": table_records(test), "validation": table_records(validation)}
    figures = draw(test, out)
    versions = merged_versions(found["versions"] for found in finished.values())
    facts = _sentence(finished, versions)
    texts = {
        "study.md": markdown_document(study, test, missing=missing, figures=figures, facts=facts),
        "study-validation.md": markdown_document(study, validation, missing=missing, facts=facts),
        "study.csv": as_csv(records["test"]),
        "study.tex": latex_document(study, test, missing=missing),
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    record: dict[str, object] = {
        "schema": SCHEMA,
        "name": study.name,
        "seeds": list(study.seeds),
        "missing": missing,
        **records,
        "runs": {
            name: {"digest": found["digest"], "seconds": found["seconds"]}
            for name, found in finished.items()
        },
        "versions": versions,
        "figures": figures,
        "config": study.model_dump(mode="json"),
    }
    write_json(out / STUDY, record)
    return record


def read_results(cells: Sequence[Cell], out: Path) -> dict[str, Method]:
    """By cell, every seed that is measured under the settings of its cell.

    Raises:
        InputError: a seed was trained under other settings.
    """
    return {
        cell.name: Method(
            cell.config.name,
            cell.stage,
            cell.run(out),
            measured_seeds(cell.config, cell.run(out), stage=cell.stage),
        )
        for cell in cells
    }


def what_ran(cells: Sequence[Cell], out: Path) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """Evaluations of the cells that are measured; of the others, why not as far as is known."""
    finished, missing = {}, {}
    for cell in cells:
        run = cell.run(out)
        if is_measured(cell.config, run):
            finished[cell.name] = read_json(run / EVALUATION)
        else:
            missing[cell.name] = failure_of(run) or NOT_RUN
    return finished, missing


def draw(tables: Sequence["DatasetTable"], out: Path) -> list[str]:
    """The figures of each dataset that has results; their paths below `out`."""
    from calib.figures import write_figures

    names = []
    for table in tables:
        measured = [row.method for row in table.rows if row.seeds]
        if measured:
            names += write_figures(measured, out / FIGURES, dataset=table.dataset)
    return [f"{FIGURES}/{name}" for name in names]


# The table of one dataset


@dataclass(frozen=True)
class Row:
    """A method as trained, or after a post-hoc method, on one dataset.

    Attributes:
        key: of the method in the study.
        values: by column, one a seed; none where nothing was measured.
        complete: whether every seed is measured.
        rank: by ECE on this dataset; `mean_rank` over datasets and ranked measures. None unless
            complete.
        tests: by measure, against the baseline; none of the baseline.
    """

    key: str
    method: Method
    values: Mapping[str, Mapping[int, float]]
    complete: bool
    rank: float | None = None
    mean_rank: float | None = None
    tests: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def seeds(self) -> int:
        return len(self.values[RANKED[0].key])

    def summary(self, column: Column) -> Summary | None:
        values = self.values[column.key].values()
        return Summary.of(values) if values else None


@dataclass(frozen=True)
class DatasetTable:
    """All rows of one dataset and split; the baseline is among them.

    Attributes:
        bins: of the binned errors, and `images` measured; None where nothing is measured yet.
    """

    dataset: str
    split: Split
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str
    bins: int | None
    images: int | None


def make_tables(
    study: StudyConfig, results: Mapping[str, Method], split: Split
) -> list[DatasetTable]:
    """One table a dataset; ranks are means over the datasets on which every seed is measured."""
    tables = [_table(study, dataset, results, split) for dataset in study.datasets]
    places = [_ranks(table) for table in tables]

    def ranked(row: Row, own: Mapping[str, Sequence[float]]) -> Row:
        label, mean = row.method.label, None
        if all(label in of_dataset for of_dataset in places):
            mean = fmean(rank for of_dataset in places for rank in of_dataset[label])
        return replace(row, rank=own[label][0] if label in own else None, mean_rank=mean)

    return [
        replace(table, rows=tuple(ranked(row, own) for row in table.rows))
        for table, own in zip(tables, places, strict=True)
    ]


def _table(
    study: StudyConfig, dataset: str, results: Mapping[str, Method], split: Split
) -> DatasetTable:
    columns = tuple(map(Column, shown_in("study"))) + (SCALED if split == "test" else ())
    rows = []
    for key, method in study.methods.items():
        kinds = ["plain", *method.post_hoc.values()]
        for label, kind in zip(row_names(key, method), kinds, strict=True):
            if split == "test" or kind == "plain":
                named = replace(results[f"{dataset}/{key}"], label=label, kind=kind)
                values = {column.key: _values(named, column, split) for column in columns}
                complete = len(values[RANKED[0].key]) == len(study.seeds)
                rows.append(Row(key, named, values, complete))
    baseline = row_names(study.baseline, study.methods[study.baseline])[0]
    measured = [found for row in rows for found in row.method.seeds.values()]
    bins, images = (measured[0].bins, measured[0].images(split)) if measured else (None, None)
    return DatasetTable(
        dataset, split, columns, tuple(_tested(rows, baseline)), baseline, bins, images
    )


def _values(method: Method, column: Column, split: Split) -> dict[int, float]:
    if not column.scaled:
        return method.values(column.measure, split=split)
    return method.values(column.measure, "scaled") if method.kind == "plain" else {}


def _tested(rows: Sequence[Row], baseline: str) -> list[Row]:
    against = next(row for row in rows if row.method.label == baseline)
    others = [row for row in rows if row is not against]
    found = {
        measure.key: compare_all(
            {row.method.label: row.values[measure.key] for row in others},
            against.values[measure.key],
            measure,
        )
        for measure in TESTED
    }
    return [
        replace(
            row,
            tests={
                key: tests[row.method.label]
                for key, tests in found.items()
                if row.method.label in tests
            },
        )
        for row in rows
    ]


def _ranks(table: DatasetTable) -> dict[str, list[float]]:
    """Ranks by each measure in RANKED, ECE first, of the rows that have every seed."""
    complete = [row for row in table.rows if row.complete]
    by_measure = [
        ranks([fmean(row.values[measure.key].values()) for row in complete], measure)
        for measure in RANKED
    ]
    return {row.method.label: [r[place] for r in by_measure] for place, row in enumerate(complete)}


def measure_table(table: DatasetTable) -> Table:
    """Means and deviations; the best mean of a column among rows that have every seed."""
    best = {
        column: column.measure.best(
            found.mean for row in table.rows if row.complete and (found := row.summary(column))
        )
        for column in table.columns
    }

    def cells(row: Row) -> list[Shown]:
        shown = [
            Shown.of(column.measure, row.summary(column), best[column] if row.complete else None)
            for column in table.columns
        ]
        places = (row.rank, row.mean_rank)
        return shown + [Shown(DASH if rank is None else f"{rank:.3g}") for rank in places]

    titles = [*(column.title for column in table.columns), "rank", "mean rank"]
    return Table("", "", titles, [(_label(row), cells(row)) for row in table.rows])


def significance_table(table: DatasetTable) -> Table:
    """Changes against the baseline, seed by seed, of the rows that share seeds with it."""

    def cells(measure: Measure, test: Comparison | None) -> list[Shown]:
        if test is None:
            return [Shown()] * 4
        change = measure.text(test.change, signed=True)
        texts = (change, f"{test.better}/{test.shared}", _p_value(test.p), _p_value(test.p_holm))
        return list(map(Shown, texts))

    titles = []
    for measure in TESTED:
        titles += [f"{measure.short}{measure.unit} change", "better", "p", "p (Holm)"]
    rows = [
        (_label(row), [cell for m in TESTED for cell in cells(m, row.tests.get(m.key))])
        for row in table.rows
        if row.tests
    ]
    return Table("", "", titles, rows)


def _label(row: Row) -> str:
    """The row's name; where seeds are missing, how many it has."""
    return row.method.label if row.complete else f"{row.method.label} (n = {row.seeds})"


def _p_value(p: float | None) -> str:
    if p is None:
        return DASH
    return "<0.001" if p < 0.001 else f"{p:.3f}"


# Documents


def markdown_document(
    study: StudyConfig,
    tables: Sequence[DatasetTable],
    *,
    missing: Mapping[str, str],
    figures: Sequence[str] = (),
    facts: str = "",
) -> str:
    """What was compared, a table and the tests of each dataset, what is missing.

    Args:
        missing: by cell, why.
        figures: paths below the document's folder.
        facts: what was run, in a sentence.
    """
    title = f"# {markdown_text(study.name)}: {tables[0].split} images"
    parts = [title, markdown_text(study.description)]
    if missing:
        lines = [f"- {markdown_text(cell)}: {markdown_text(why)}" for cell, why in missing.items()]
        parts += ["**Incomplete.** These cells are not measured:", "\n".join(lines)]
    for table in tables:
        images = "" if table.images is None else f", {table.images:,} {table.split} images"
        parts += [f"## {markdown_text(table.dataset)}{images}", as_markdown(measure_table(table))]
        if (tests := significance_table(table)).rows:
            parts += [f"Against {markdown_text(table.baseline)}, seed by seed:", as_markdown(tests)]
    parts += [legend(study, tables), markdown_text(facts), *(f"![]({path})" for path in figures)]
    return "\n\n".join(part for part in parts if part) + "\n"


def legend(study: StudyConfig, tables: Sequence[DatasetTable]) -> str:
    """How to read the figures, in sentences."""
    bins = sorted({table.bins for table in tables if table.bins is not None})
    seeds = ", ".join(map(str, study.seeds))
    baseline = markdown_text(tables[0].baseline)
    ranked = ", ".join(measure.short for measure in RANKED)
    sentences = [
        f"Mean ± sample standard deviation over seeds, n = {len(study.seeds)} ({seeds});"
        f" binned errors with {' or '.join(map(str, bins)) or 'no'} bins.",
        "The best mean of a column is bold, among rows that have every seed; O-ECE + U-ECE = ECE"
        " are not marked.",
        f"Rank is by ECE on the dataset, mean rank over datasets and {ranked}; 1 is the best.",
        f"Tests against {baseline} are two-sided paired t-tests over shared seeds,"
        " corrected by Holm's method over the rows of a dataset for each measure;"
        " below three shared seeds there is no p-value.",
    ]
    if tables[0].split == "test":
        sentences.append("TS: after temperature scaling on validation images.")
    else:
        sentences.append("Validation images also chose the temperature, and epochs where asked to.")
    return " ".join(sentences)


def latex_document(
    study: StudyConfig, tables: Sequence[DatasetTable], *, missing: Mapping[str, str]
) -> str:
    """A document that compiles as it stands; each `tabular` can be lifted out of it."""
    parts = [LATEX, rf"\section*{{{latex_text(study.name)}}}"]
    if missing:
        cells = "; ".join(f"{latex_text(cell)}: {latex_text(why)}" for cell, why in missing.items())
        parts.append(rf"\textbf{{Incomplete.}} Not measured: {cells}.")
    for table in tables:
        bins = "" if table.bins is None else f"; {table.bins} bins"
        images = "" if table.images is None else f"{table.images} "
        caption = f"{table.dataset}, {images}{table.split} images: mean and standard deviation over"
        parts.append(_floating(measure_table(table), f"{caption} {len(study.seeds)} seeds{bins}."))
        if (tests := significance_table(table)).rows:
            caption = f"{table.dataset}: change against {table.baseline}, seeds on which it is"
            caption += " better, and p of a paired t-test, as it is and Holm-corrected."
            parts.append(_floating(tests, caption))
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


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
    summary: dict[str, Spread | None]  # by column
    seeds: dict[str, dict[str, float]]  # every measure by seed
    scaled: dict[str, dict[str, float]]  # likewise after temperature scaling, of plain rows
    rank: float | None
    mean_rank: float | None
    tests: dict[str, dict[str, float | None]]  # a `Comparison` by measure


class TableRecord(TypedDict):
    """One dataset of study.json."""

    bins: int | None
    images: int | None
    baseline: str
    rows: list[RowRecord]


def as_csv(records: Mapping[str, TableRecord]) -> str:
    """What `table_records` gave, a line a dataset and row; what was not measured is empty."""
    from pandas import DataFrame

    lines = [
        {"dataset": dataset, **_line(row, table["bins"])}
        for dataset, table in records.items()
        for row in table["rows"]
    ]
    text: str = DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n")
    return text


def _line(row: RowRecord, bins: int | None) -> dict[str, object]:
    line: dict[str, object] = {"method": row["method"], "run": row["run"], "kind": row["kind"]}
    line |= {"seeds": len(row["seeds"]), "bins": bins}
    for key, found in row["summary"].items():
        line |= {key: found and found["mean"], f"{key}_sd": found and found["sd"]}
    line |= {"rank": row["rank"], "mean_rank": row["mean_rank"]}
    for measure in TESTED:
        test = row["tests"].get(measure.key, {})
        for key in ("change", "better", "shared", "p", "p_holm"):
            line[f"{measure.key}_{key}"] = test.get(key)
    return line


def table_records(tables: Sequence[DatasetTable]) -> dict[str, TableRecord]:
    """By dataset: each row with its summaries and every seed's values."""
    return {
        table.dataset: {
            "bins": table.bins,
            "images": table.images,
            "baseline": table.baseline,
            "rows": [_record(table, row) for row in table.rows],
        }
        for table in tables
    }


def _record(table: DatasetTable, row: Row) -> RowRecord:
    def seeds(kind: str) -> dict[str, dict[str, float]]:
        found = row.method.figures(kind, table.split)
        return {str(seed): dict(values) for seed, values in found.items()}

    summaries = {column.key: row.summary(column) for column in table.columns}
    return {
        "method": row.method.label,
        "run": f"{table.dataset}/{row.key}",
        "kind": row.method.kind,
        "complete": row.complete,
        "summary": {key: found.record() if found else None for key, found in summaries.items()},
        "seeds": seeds(row.method.kind),
        "scaled": seeds("scaled") if row.method.kind == "plain" else {},
        "rank": row.rank,
        "mean_rank": row.mean_rank,
        "tests": {key: asdict(test) for key, test in row.tests.items()},
    }


def _sentence(finished: Mapping[str, Evaluation], versions: Mapping[str, str]) -> str:
    if not finished:
        return ""
    minutes = sum(found["seconds"] for found in finished.values()) / 60
    names = ", ".join(f"{library} {version}" for library, version in versions.items())
    return f"Training and measuring {len(finished)} runs took {minutes:.1f} minutes, with {names}."
