"""The table that compares the mixed datasets of a study, build by build."""

from pathlib import Path
from typing import TYPE_CHECKING

from semix.calib.replicates import Unit, UnitValues, compare
from semix.calib.results import Summary
from semix.calib.tables import Table, TableCell

if TYPE_CHECKING:
    from pandas import DataFrame

MIXED_FIGURES = "mixed.csv"  # below a study's folder
# Titles, and decimals.
OF_MIXED = {
    "stability": ("stability of the noises", 3),
    "candidates_stability": ("of all candidates", 3),
    "diversity": ("diversity", 4),
    "end_points": ("end points nearest to their class", 3),
    "spearman": ("Spearman of alpha and weight", 3),
}
MIXED_NOTE = (
    "Means over splits and draws, ± sample standard deviation. Stability: cosine of an initial"
    " noise and the one that inversion recovers. Diversity: 1 - cosine of CLIP features, over"
    " pairs of series of the same classes at the same alpha. Changes are against the first row,"
    " with 95 % intervals over splits and draws."
)


def read_mixed(out: Path) -> "DataFrame | None":
    """The study's figures of its mixed datasets; None if it made none."""
    from pandas import read_csv

    return read_csv(out / MIXED_FIGURES) if (out / MIXED_FIGURES).is_file() else None


def mixed_table(frame: "DataFrame") -> Table:
    """Each build's means, and its changes against the first build of the dataset.

    Args:
        frame: one line per mixed dataset: dataset, build, split, draw, and the figures of
            OF_MIXED, empty if not measured.
    """
    rows, first = [], dict[str, "DataFrame"]()
    for (dataset, build), lines in frame.groupby(["dataset", "build"], sort=False):
        base = first.setdefault(dataset, lines)
        cells = [
            _cell(_by_unit(lines, key), None if base is lines else _by_unit(base, key), digits)
            for key, (_, digits) in OF_MIXED.items()
        ]
        rows.append((f"{dataset}, {build}", cells))
    return Table("", "", [title for title, _ in OF_MIXED.values()], rows)


def _by_unit(frame: "DataFrame", key: str) -> dict[Unit, list[float]]:
    measured = frame[frame[key].notna()].fillna({"split": 0, "draw": 0})
    units = zip(measured["split"], measured["draw"], measured[key], strict=True)
    return {Unit(int(split), int(draw), 0): [value] for split, draw, value in units}


def _cell(of_build: UnitValues, baseline: UnitValues | None, digits: int) -> TableCell:
    if not of_build:
        return TableCell()
    summary = Summary.of(value for [value] in of_build.values())
    note = "" if summary.sd is None else f"± {summary.sd:.{digits}f}"
    change = compare(of_build, baseline) if baseline else None
    if change is not None and change.low is not None and change.high is not None:
        ends = f"[{change.low:+.{digits}f}, {change.high:+.{digits}f}]"
        note += f", change {change.change:+.{digits}f} {ends}"
    return TableCell(f"{summary.mean:.{digits}f}", note)
