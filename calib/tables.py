"""Tables of results: in the terminal, as Markdown, LaTeX and CSV, and for the HTML page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from semix.calib.calibrators import CALIBRATORS, PLAIN
from semix.calib.replicates import Comparison, compare
from semix.calib.results import MethodResult, significant_change
from semix.calib.run_folder import Shift
from semix.calib.shown_measures import (
    ACCURACY,
    ECE,
    MEASURE,
    NLL,
    Measure,
    Summary,
    SummaryRecord,
    measures_in,
)
from semix.data.printable import markdown_text, printable, printable_line, spreadsheet_text

if TYPE_CHECKING:
    from pandas import DataFrame

MAIN_KINDS: dict[str, str] = {PLAIN: "as trained", "scaled": CALIBRATORS["scaled"].label}
KIND_LABELS: dict[str, str] = {
    PLAIN: "",
    **{name: kind.label for name, kind in CALIBRATORS.items()},
}
PROPER = (NLL, MEASURE["brier"])
RELATIVE_DECREASE = Measure("share", "Share", "Share", (), percent=True)
DASH = "\N{EN DASH}"
IMAGES_IN_TITLES = {"shift": "corrupted", "ood": "OOD"}
PREFIXES = {"test": "", "shift": "shift_", "ood": "foreign_"}  # of measures, in files


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        kind: of calibration, beside rows as trained; "": that of the row.
        part: the images: "test", "shift" (corrupted ones) or "ood".
    """

    measure: Measure
    kind: str = ""
    part: str = "test"

    @property
    def key(self) -> str:
        """Its name in files of a study."""
        return column_key(self.measure.key, self.kind, self.part)

    @property
    def title(self) -> str:
        images = f", {IMAGES_IN_TITLES[self.part]}" if self.part in IMAGES_IN_TITLES else ""
        return self.measure.short + (" + TS" if self.kind else "") + images + self.measure.unit


def column_key(measure: str, kind: str, part: str) -> str:
    """The name of a column in files of a study."""
    names = [measure, kind] if part == "test" else [kind, measure]
    return PREFIXES[part] + "_".join(filter(None, names))


SCALED = (Column(ECE, "scaled"), Column(NLL, "scaled"))
OVERVIEW = (Column(ACCURACY), Column(ECE), SCALED[0], Column(NLL), SCALED[1])


@dataclass(frozen=True)
class TableCell:
    """One cell of a table: its text, a note behind it, and whether it is the best of its column."""

    text: str = DASH
    note: str = ""  # the standard deviation, or the interval of a difference
    best: bool = False

    @classmethod
    def of(cls, measure: Measure, summary: Summary | None, best: str | None = None) -> "TableCell":
        """The cell of a mean with its standard deviation.

        Args:
            best: text of the best mean of the column, from `Measure.best`.
        """
        if summary is None:
            return cls()
        text = measure.text(summary.mean)
        return cls(text, measure.deviation(summary), measure.marked and text == best)

    def __str__(self) -> str:
        return f"{self.text} {self.note}".rstrip()


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its label and one cell per column.

    Attributes:
        kind: of calibration, for pages that show it apart from the label.
        note: "T = 1.52 ± 0.10" after temperature scaling; or why a difference is not trusted.
    """

    label: str
    cells: Sequence[TableCell]
    kind: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        note: printed below the table.
        columns: titles of the columns, without that of the labels.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[TableRow]


# Formats of a table


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table without breaking words or numbers, even if it is wider than the terminal."""
    console = console or Console()
    # As Text: of strings, such as a method's name, rich would interpret markup.
    printed = RichTable(
        title=_printable_text(table.title) if table.title else None,
        caption=_printable_text(table.note),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    printed.add_column("", overflow="fold")
    texts = [[printable(str(cell)).replace(" ± ", "±") for cell in row.cells] for row in table.rows]
    for title, *column in zip(table.columns, *texts, strict=True):
        head = printable_line(title).replace(" + ", "\n+ ")
        width = max(len(line) for text in (head, *column) for line in text.splitlines())
        printed.add_column(Text(head), justify="right", min_width=width, no_wrap=True)
    for row, cells in zip(table.rows, texts, strict=True):
        printed.add_row(_printable_text(row.label), *map(Text, cells))
    min_width = Measurement.get(console, console.options.update(width=10_000), printed).minimum
    previous_width, console.width = console.width, max(console.width, min_width)
    console.print(printed)
    console.width = previous_width


def _printable_text(text: str) -> Text:
    return Text(printable_line(text))


def csv_text(frame: "DataFrame", *, float_format: str | None = None) -> str:
    """CSV, one line per row; strings that a spreadsheet would take for a formula are quoted."""

    def plain(cell: object) -> object:
        return spreadsheet_text(cell) if isinstance(cell, str) else cell

    quoted = frame.copy(deep=False).rename(columns=plain)
    for number, kind in enumerate(frame.dtypes):
        if kind.kind not in "biuf":
            quoted.isetitem(number, frame.iloc[:, number].map(plain).to_numpy())
    text: str = quoted.to_csv(index=False, lineterminator="\n", float_format=float_format)
    return text


def as_markdown(table: Table) -> str:
    """The table as Markdown, without title and note."""
    right = ["right"] * len(table.columns)
    frame = _frame(table, markdown_text, bold="**{}**".format)
    text: str = frame.to_markdown(index=False, disable_numparse=True, colalign=["left", *right])
    return text


def as_latex(table: Table) -> str:
    """The table as a LaTeX `tabular`, for the package booktabs."""
    frame = _frame(table, latex_text, bold=r"\textbf{{{}}}".format)
    text: str = frame.to_latex(index=False, column_format="l" + "r" * len(table.columns))
    return text.rstrip()


def latex_text(text: str) -> str:
    """Escape a string for LaTeX."""
    return printable(" ".join(text.split())).translate(LATEX_ESCAPES)


LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        DASH: "--",
        "\N{MINUS SIGN}": "$-$",
        "\N{PLUS-MINUS SIGN}": r"$\pm$",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)


def _frame(
    table: Table, escape: Callable[[str], str], *, bold: Callable[[str], str]
) -> "DataFrame":
    from pandas import DataFrame

    def format_cell(cell: TableCell) -> str:
        text = escape(cell.text)
        return f"{bold(text) if cell.best else text} {escape(cell.note)}".rstrip()

    lines = [[escape(row.label), *map(format_cell, row.cells)] for row in table.rows]
    return DataFrame(lines, columns=[escape(title) for title in ("method", *table.columns)])


# Runs side by side


class MethodRecord(TypedDict):
    """A method as JSON, in fractions; only methods with equal `data` can be compared."""

    method: str
    stage: str
    run: str
    data: str
    seeds: int
    bins: int
    temperature: SummaryRecord
    plain: dict[str, SummaryRecord]  # by measure
    scaled: dict[str, SummaryRecord]


def summary_table(methods: Sequence[MethodResult]) -> list[MethodRecord]:
    """One record per method."""
    return [
        {
            "method": method.label,
            "stage": method.stage,
            "run": str(method.run),
            "data": method.data,
            "seeds": len(method.seeds),
            "bins": method.bins,
            "temperature": method.temperature().record(),
            "plain": {m.key: method.summary(m, PLAIN).record() for m in measures_in("page")},
            "scaled": {m.key: method.summary(m, "scaled").record() for m in measures_in("page")},
        }
        for method in methods
    ]


def overview(methods: Sequence[MethodResult]) -> Table:
    """Accuracy, and ECE and NLL as trained and after temperature scaling."""
    seeds = _join_distinct(len(method.seeds) for method in methods)
    note = f"mean ± standard deviation over seeds ({seeds}); TS: after temperature scaling"
    note += f"; ECE: {_join_distinct(method.bins for method in methods)} bins"
    if len({method.data for method in methods}) > 1:
        note += "; methods on different images do not compare"
    rows = [(method.label, method, PLAIN, "test") for method in methods]
    return means_table("", note, OVERVIEW, rows)


def means_table(
    title: str,
    note: str,
    columns: Sequence[Column],
    rows: Iterable[tuple[str, MethodResult, str, str]],
) -> Table:
    """A table of means and standard deviations over seeds.

    Args:
        rows: label, method, kind and part of each row.
    """

    def cell(column: Column, method: MethodResult, kind: str, part: str) -> TableCell:
        measure = column.measure
        return TableCell.of(measure, method.summary(measure, column.kind or kind, part))

    shown = [
        TableRow(label, [cell(column, method, kind, part) for column in columns])
        for label, method, kind, part in rows
    ]
    return Table(title, note, [column.title for column in columns], shown)


def _join_distinct(values: Iterable[int]) -> str:
    return " / ".join(sorted({str(value) for value in values}))


def comparison(methods: Sequence[MethodResult]) -> list[list[TableRow]]:
    """All measures of the page: for each method a row as trained and a row after scaling.

    The best mean of a column is marked, separately among the rows of each kind.
    """
    best = {
        (measure, kind): measure.best(method.summary(measure, kind).mean for method in methods)
        for measure in measures_in("page")
        for kind in MAIN_KINDS
    }

    def line(method: MethodResult, kind: str) -> TableRow:
        fitted = method.temperature()
        sd = "" if fitted.sd is None else f" ± {fitted.sd:.2f}"
        note = f"T = {fitted.mean:.2f}{sd}" if kind == "scaled" else ""
        cells = [
            TableCell.of(measure, method.summary(measure, kind), best[measure, kind])
            for measure in measures_in("page")
        ]
        return TableRow(method.label, cells, MAIN_KINDS[kind], note)

    return [[line(method, kind) for kind in MAIN_KINDS] for method in methods]


def differences(methods: Sequence[MethodResult]) -> list[list[TableRow]]:
    """Mean differences to the first method over shared seeds, with intervals."""
    baseline, *others = methods

    def line(method: MethodResult, kind: str) -> TableRow:
        tests = {
            measure: compare(method.resamples(measure, kind), baseline.resamples(measure, kind))
            for measure in measures_in("page")
        }
        # All measures have the same seeds, so the note holds for the whole row.
        reason = next((test.too_few for test in tests.values() if test and test.too_few), "")
        absent = TableCell("n/a", "no shared seed")
        cells = [change_cell(test, m) if test else absent for m, test in tests.items()]
        return TableRow(method.label, cells, MAIN_KINDS[kind], reason)

    return [[line(method, kind) for kind in MAIN_KINDS] for method in others]


def change_cell(test: Comparison, measure: Measure) -> TableCell:
    """A change with its interval, and whether it is better or worse."""
    note = f"{interval_text(test, measure)} {significant_change(test, measure)}".strip()
    return TableCell(measure.text(test.change, signed=True), note)


def interval_text(test: Comparison, measure: Measure) -> str:
    """The interval of a comparison: `[-0.95, -0.41]`; empty if it has none."""
    if test.low is None or test.high is None:
        return ""
    ends = ", ".join(measure.text(end, signed=True) for end in (test.low, test.high))
    return f"[{ends}]"


# Details of one or several runs


def details(methods: Sequence[MethodResult]) -> list[Table]:
    """Post-hoc calibration, selective prediction, conformal sets, corrupted and OOD images.

    A method is in a table if all of its seeds have the measures; empty tables are left out.
    """
    tables = (
        _kinds(methods),
        improvements(methods),
        _selective(methods),
        _conformal(methods),
        _shift(methods),
        _ood(methods),
    )
    return [table for table in tables if table.rows]


def _kinds(methods: Sequence[MethodResult]) -> Table:
    measures = measures_in("run")
    rows = [
        TableRow(
            f"{method.label} {label}".rstrip(), [_with_interval(method, m, kind) for m in measures]
        )
        for method in methods
        for kind, label in KIND_LABELS.items()
        if method.has(kind)
    ]
    seeds = _join_distinct(len(method.seeds) for method in methods)
    note = f"Mean ± standard deviation over seeds ({seeds}), {methods[0].bins} bins"
    note += "; AECE: bins of equal count, cwECE: mean over classes"
    note += "; post-hoc calibration is fitted on validation images"
    if any(method.intervals(ECE, PLAIN) for method in methods):
        note += ". In brackets 95 % bootstrap intervals, limits averaged over seeds: what another "
        note += "test set of this size would change, not another training"
    columns = [Column(measure).title for measure in measures]
    return Table("Post-hoc calibration", f"{note}.", columns, rows)


def _with_interval(method: MethodResult, measure: Measure, kind: str) -> TableCell:
    text = measure.spread(method.summary(measure, kind))
    if limits := method.intervals(measure, kind):
        ends = (measure.text(Summary.of(side).mean) for side in zip(*limits, strict=True))
        text += f"\n[{', '.join(ends)}]"
    return TableCell(text)


def improvements(
    methods: Sequence[MethodResult], kinds: Sequence[str] = tuple(CALIBRATORS)
) -> Table:
    """The relative decrease of proper scores by each kind of post-hoc calibration."""

    def relative_decrease(method: MethodResult, measure: Measure, kind: str) -> TableCell:
        uncalibrated, calibrated = method.values(measure, PLAIN), method.values(measure, kind)
        decreases = Summary.of(
            1 - calibrated[seed] / uncalibrated[seed] for seed in calibrated if uncalibrated[seed]
        )
        return TableCell(RELATIVE_DECREASE.spread(decreases))

    rows = [
        TableRow(
            f"{method.label} {KIND_LABELS[kind]}",
            [relative_decrease(method, m, kind) for m in PROPER],
        )
        for method in methods
        for kind in kinds
        if method.has(kind) and method.kind == PLAIN
    ]
    note = "Relative decrease of NLL and Brier score in percent; below zero it is an increase. ECE "
    note += "can fall while these rise: it does not see the damage to the ranking."
    if "isotonic" in kinds and any(method.has("isotonic") for method in methods):
        note += " Isotonic regression is a weak baseline: in CalArena it is worse than no "
        note += "calibration on CIFAR-100."
    return Table("Improvement in proper scores", note, ["NLL %", "Brier %"], rows)


def _selective(methods: Sequence[MethodResult]) -> Table:
    rows = [
        (f"{method.label} {MAIN_KINDS[kind]}", method, kind, "test")
        for method in methods
        for kind in MAIN_KINDS
        if method.has(kind)
    ]
    note = "The most confident test images first. AUGRC: errors among the k most confident, over "
    note += "all images; vECE: a lower bound of the calibration error, by recalibrating with other "
    note += "test images; it can be below zero by chance."
    columns = tuple(map(Column, measures_in("selective")))
    return means_table("Selective prediction", note, columns, rows)


def _conformal(methods: Sequence[MethodResult]) -> Table:
    rows = [
        (f"{method.label}, {score.upper()}", method, score, part)
        for method in methods
        for score, part in method.parts("conformal")
    ]
    note = "Sets of classes that should hold the true one for nine images in ten, calibrated on "
    note += "validation images after temperature scaling; APS and RAPS are not randomised and "
    note += "cover more."
    columns = tuple(map(Column, measures_in("conformal")))
    return means_table("Conformal sets", note, columns, rows)


def _shift(methods: Sequence[MethodResult]) -> Table:
    shifted = [method for method in methods if method.has(PLAIN, "shift")]
    shifts = [result.shift for method in shifted for result in method.seeds.values()]
    descriptions = sorted({_describe_shift(shift) for shift in shifts if shift})
    note = (
        f"Mean over {' / '.join(descriptions)}; TS: the temperature of the clean validation images."
    )
    columns = [Column(measure) for measure in measures_in("shift")]
    columns.insert(1 + columns.index(Column(ECE)), Column(ECE, "scaled"))
    rows = [(method.label, method, PLAIN, "shift") for method in shifted]
    return means_table("Corrupted test images", note, columns, rows)


def _ood(methods: Sequence[MethodResult]) -> Table:
    rows = [
        (f"{method.label}, {part[4:] or 'mean over sets'}", method, kind, part)
        for method in methods
        for kind, part in method.parts("ood")
        if kind == PLAIN
    ]
    note = "How well the largest probability, or the entropy, separates test images from those of "
    note += "other datasets. FPR95: share of OOD images accepted where 95 % of the test images are."
    columns = tuple(map(Column, measures_in("ood")))
    return means_table("Out-of-distribution (OOD) images", note, columns, rows)


def _describe_shift(shift: Shift) -> str:
    severities = next(iter(shift["corruptions"].values())).keys() - {"mean"}
    return (
        f"{len(shift['corruptions'])} corruptions x {len(severities)} severities of "
        f"{shift['images']:,} images, ECE of {shift['bins']} bins"
    )
