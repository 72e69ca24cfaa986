"""A study's tables as a LaTeX document that compiles as it stands, with booktabs."""

from collections.abc import Mapping, Sequence

from calib.study.columns import TESTED, Column
from calib.study.config import StudyConfig
from calib.study.rows import Row, Summary
from calib.study.table import Table

ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\N{EN DASH}": "--",
    "\N{MINUS SIGN}": "$-$",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
HEAD = r"""\documentclass{article}
\usepackage[a4paper,landscape,margin=15mm]{geometry}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\begin{document}"""
FOOT = r"\end{document}"


def as_latex(study: StudyConfig, tables: Sequence[Table], *, missing: Mapping[str, str]) -> str:
    """A document; each `tabular` can be lifted out of it."""
    parts = [HEAD, rf"\section*{{{escape(study.name)}}}"]
    if missing:
        cells = "; ".join(f"{escape(cell)}: {escape(why)}" for cell, why in missing.items())
        parts.append(rf"\textbf{{Incomplete.}} Not measured: {cells}.")
    seeds = len(study.seeds)
    for table in tables:
        bins = "" if table.bins is None else f"; {table.bins} bins"
        images = "" if table.images is None else f"{table.images} "
        caption = f"{table.dataset}, {images}{table.split} images: mean and standard deviation over"
        parts.append(_floating(_measures(table), escape(f"{caption} {seeds} seeds{bins}.")))
        if any(row.tests for row in table.rows):
            caption = f"{table.dataset}: change against {table.baseline}, seeds on which it is"
            caption += " better, and Holm-corrected p of a paired t-test."
            parts.append(_floating(_tests(table), escape(caption)))
    return "\n\n".join([*parts, FOOT]) + "\n"


def escape(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(ESCAPED.get(letter, letter) for letter in " ".join(text.split()))


def _floating(tabular: str, caption: str) -> str:
    body = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{tabular}}}"
    return f"\\begin{{table}}[h]\n\\centering\n\\caption{{{caption}}}\n{body}\n\\end{{table}}"


def _measures(table: Table) -> str:
    titles = ["Method", *(column.title for column in table.columns), "Rank", "Mean rank"]
    rows = [
        [
            _label(row),
            *(_number(row.cells[column.key], column) for column in table.columns),
            *("--" if rank is None else f"{rank:.3g}" for rank in (row.rank, row.mean_rank)),
        ]
        for row in table.rows
    ]
    return _tabular([escape(title) for title in titles], rows)


def _tests(table: Table) -> str:
    titles = ["Method"]
    for measure in TESTED:
        unit = " %" if measure.percent else ""
        titles += [f"{measure.title}{unit} change", "better", "p"]
    rows = [[_label(row), *_tests_of(row)] for row in table.rows if row.tests]
    return _tabular([escape(title) for title in titles], rows)


def _tests_of(row: Row) -> list[str]:
    cells = []
    for measure in TESTED:
        test = row.tests.get(measure.key)
        if test is None:
            cells += ["--"] * 3
            continue
        p = "--" if test.p_holm is None else f"{test.p_holm:.3f}"
        cells += [escape(measure.text(test.change, signed=True)), f"{test.better}/{test.shared}", p]
    return cells


def _label(row: Row) -> str:
    return escape(row.label if row.complete else f"{row.label} (n = {len(row.values)})")


def _number(summary: Summary | None, column: Column) -> str:
    if summary is None:
        return "--"
    mean = column.measure.text(summary.mean)
    shown = rf"\textbf{{{mean}}}" if summary.best else mean
    return shown if summary.sd is None else rf"{shown} $\pm$ {column.measure.text(summary.sd)}"


def _tabular(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [r"\begin{tabular}{l" + "r" * (len(titles) - 1) + "}", r"\toprule"]
    lines += [" & ".join(titles) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
