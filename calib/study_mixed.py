"""The table of a study that compares its mixed datasets, one row per build."""

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING

from semix.calib.replicates import Unit, UnitValues, compare
from semix.calib.shown_measures import Summary
from semix.calib.tables import Table, TableCell, TableRow

if TYPE_CHECKING:
    from pandas import DataFrame

MIXED_CSV = "mixed.csv"  # in the folder of a study
# Column of mixed.csv: title, and number of decimals.
MIXED_MEASURES = {
    "stability": ("stability of the noises", 3),
    "candidates_stability": ("of all candidates", 3),
    "diversity": ("diversity", 4),
    "end_points": ("end points nearest to their class", 3),
    "spearman": ("Spearman of alpha and weight", 3),
}
MIXED_NOTE = (
    "Means over splits and draws, ± sample standard deviation. Stability: cosine of an initial"
    " noise and the noise that inversion recovers. Diversity: 1 - cosine of CLIP features, over"
    " pairs of series of the same classes at the same alpha. Changes are against the first row,"
    " with 95 % intervals over splits and draws."
)


def read_mixed(out: Path) -> "DataFrame | None":
    """Read the measures of the study's mixed datasets; None if it made none."""
    from pandas import read_csv

    return read_csv(out / MIXED_CSV) if (out / MIXED_CSV).is_file() else None


def mixed_table(frame: "DataFrame") -> Table:
    """The means of each build, and their changes against the first build of the dataset.

    Args:
        frame: one row per mixed dataset, with columns dataset, build, split, draw, and those of
            MIXED_MEASURES, empty if not measured.
    """
    rows, first_builds = [], dict[Hashable, "DataFrame"]()
    for (dataset, build), lines in frame.groupby(["dataset", "build"], sort=False):
        baseline = first_builds.setdefault(dataset, lines)
        cells = [
            _cell(
                _by_unit(lines, key), None if baseline is lines else _by_unit(baseline, key), digits
            )
            for key, (_, digits) in MIXED_MEASURES.items()
        ]
        rows.append(TableRow(f"{dataset}, {build}", cells))
    return Table("", "", [title for title, _ in MIXED_MEASURES.values()], rows)


def _by_unit(frame: "DataFrame", key: str) -> dict[Unit, list[float]]:
    measured = frame[frame[key].notna()].fillna({"split": 0, "draw": 0})
    units = zip(measured["split"], measured["draw"], measured[key], strict=True)
    return {Unit(int(split), int(draw), 0): [value] for split, draw, value in units}


def _cell(values: UnitValues, baseline: UnitValues | None, digits: int) -> TableCell:
    if not values:
        return TableCell()
    summary = Summary.of(value for [value] in values.values())
    note = "" if summary.sd is None else f"± {summary.sd:.{digits}f}"
    change = compare(values, baseline) if baseline else None
    if change is not None and change.low is not None and change.high is not None:
        ends = f"[{change.low:+.{digits}f}, {change.high:+.{digits}f}]"
        note += f", change {change.change:+.{digits}f} {ends}"
    return TableCell(f"{summary.mean:.{digits}f}", note)
