"""A study's tables as Markdown."""

from collections.abc import Mapping, Sequence

from calib.study.columns import RANKED, TESTED, Column
from calib.study.config import StudyConfig
from calib.study.rows import Row, Summary
from calib.study.table import Table
from data.printable import markdown_text

DASH = "\N{EN DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def as_markdown(
    study: StudyConfig,
    tables: Sequence[Table],
    *,
    missing: Mapping[str, str],
    figures: Sequence[str] = (),
    facts: str = "",
) -> str:
    """A document: what was compared, a table and the tests of each dataset, what is missing.

    Args:
        missing: by cell, why.
        figures: paths below the document's folder.
        facts: what was run, in a sentence.
    """
    split = tables[0].split
    parts = [
        f"# {markdown_text(study.name)}: {split} images",
        markdown_text(study.description),
        *gaps(missing),
    ]
    for table in tables:
        parts += [_title(table), _measures(table), _tests(table)]
    parts += [legend(study, tables), markdown_text(facts), *(f"![]({path})" for path in figures)]
    return "\n\n".join(part for part in parts if part) + "\n"


def gaps(missing: Mapping[str, str]) -> list[str]:
    """What an incomplete study lacks."""
    if not missing:
        return []
    lines = [f"- {markdown_text(cell)}: {markdown_text(why)}" for cell, why in missing.items()]
    return ["**Incomplete.** These cells are not measured:", "\n".join(lines)]


def legend(study: StudyConfig, tables: Sequence[Table]) -> str:
    """How to read the figures, in sentences."""
    bins = sorted({table.bins for table in tables if table.bins is not None})
    seeds = ", ".join(map(str, study.seeds))
    baseline = markdown_text(tables[0].baseline)
    ranked = ", ".join(measure.title for measure in RANKED)
    sentences = [
        f"Mean {PLUS_MINUS} sample standard deviation over seeds, n = {len(study.seeds)} ({seeds});"
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


def _title(table: Table) -> str:
    images = "" if table.images is None else f", {table.images:,} {table.split} images"
    return f"## {markdown_text(table.dataset)}{images}"


def _measures(table: Table) -> str:
    titles = ["method", *(column.title for column in table.columns), "rank", "mean rank"]
    rows = [
        [
            label(row),
            *(number(row.cells[column.key], column) for column in table.columns),
            _rank(row.rank),
            _rank(row.mean_rank),
        ]
        for row in table.rows
    ]
    return grid(titles, rows)


def _tests(table: Table) -> str:
    rows = [[label(row), *_tests_of(row)] for row in table.rows if row.tests]
    if not rows:
        return ""
    titles = ["method"]
    for measure in TESTED:
        name = measure.title + (" %" if measure.percent else "")
        titles += [f"{name} change", "better", "p", "p (Holm)"]
    return f"Against {markdown_text(table.baseline)}, seed by seed:\n\n{grid(titles, rows)}"


def _tests_of(row: Row) -> list[str]:
    cells = []
    for measure in TESTED:
        test = row.tests.get(measure.key)
        if test is None:
            cells += [DASH] * 4
            continue
        cells += [measure.text(test.change, signed=True), f"{test.better}/{test.shared}"]
        cells += [p_value(test.p), p_value(test.p_holm)]
    return cells


def label(row: Row) -> str:
    """The row's name; where seeds are missing, how many it has."""
    return markdown_text(row.label) + ("" if row.complete else f" (n = {len(row.values)})")


def number(summary: Summary | None, column: Column) -> str:
    if summary is None:
        return DASH
    mean = column.measure.text(summary.mean)
    sd = "" if summary.sd is None else f" {PLUS_MINUS} {column.measure.text(summary.sd)}"
    return (f"**{mean}**" if summary.best else mean) + sd


def p_value(p: float | None) -> str:
    if p is None:
        return DASH
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column left, the others right."""
    rules = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rules, *rows))


def _rank(rank: float | None) -> str:
    return DASH if rank is None else f"{rank:.3g}"
