"""A study's figures: ECE of each method, accuracy against ECE, reliability diagrams."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calib.metrics import ReliabilityBins, reliability_bins
from calib.study.columns import ACCURACY, ECE, Column
from calib.study.results import Result, Results
from calib.study.rows import Row
from calib.study.table import Table
from data.pages import LIGHT

STYLE: Any = {  # matplotlib types its keys one by one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT.muted,
}
DPI = 150
TITLE = 22  # letters in a line above a small diagram
MARKERS = "Ds^v" * 8  # another where the twenty colours begin anew
FEW = 20  # predictions; a bin with fewer is drawn pale, as its accuracy is mostly chance


def write_figures(tables: Sequence[Table], results: Results, folder: Path) -> list[str]:
    """Three PNG files a dataset that has results.

    Returns:
        Their names, without the folder.
    """
    names = []
    for table in tables:
        rows = [row for row in table.rows if row.values]
        if not rows:
            continue
        drawn = {
            f"ece-{table.dataset}.png": ece_figure(rows, results, table),
            f"accuracy-ece-{table.dataset}.png": accuracy_figure(rows),
            f"reliability-{table.dataset}.png": reliability_figure(rows, results, table),
        }
        for name, figure in drawn.items():
            folder.mkdir(parents=True, exist_ok=True)
            with matplotlib.rc_context(STYLE):
                figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
            names.append(name)
    return names


def ece_figure(rows: Sequence[Row], results: Results, table: Table) -> Figure:
    """A dot a seed with its bootstrap interval where there is one; bar: mean and deviation."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            summary = row.cells[ECE.key]
            assert summary is not None
            spread = 0.0 if summary.sd is None else summary.sd
            axes.errorbar(
                100 * summary.mean, place, xerr=100 * spread, fmt="D", color=LIGHT.ink, capsize=3
            )
            intervals = _intervals(row, results, table)
            values = row.of(Column(ECE))
            for seed, height in zip(values, _spread_out(len(values)), strict=True):
                axes.plot(100 * values[seed], place + height, "o", color=LIGHT.first, markersize=4)
                if seed in intervals:
                    low, high = intervals[seed]
                    axes.plot(
                        [100 * low, 100 * high], [place + height] * 2, color=LIGHT.first, alpha=0.4
                    )
        axes.set_yticks(range(len(rows)), [_plain(row.label) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"ECE % ({table.bins} bins)")
        axes.set_xlim(left=0)
        legend = "black: mean ± standard deviation; dots: seeds with 95 % bootstrap intervals"
        figure.suptitle(legend, fontsize=8)
    return figure


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Each method's mean, with its seeds as small dots."""
    with matplotlib.rc_context(STYLE):
        height = max(4.4, 0.5 + 0.18 * len(rows))  # the legend has a line a row
        figure = Figure(figsize=(6.4, height), layout="constrained")
        axes = figure.add_subplot()
        colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
        for place, row in enumerate(rows):
            accuracy, error = row.of(Column(ACCURACY)), row.of(Column(ECE))
            colour, marker = colours[place % len(colours)], MARKERS[place // len(colours)]
            points = [[100 * values[seed] for seed in accuracy] for values in (accuracy, error)]
            axes.plot(*points, "o", color=colour, markersize=3, alpha=0.6)
            means = [sum(values) / len(values) for values in points]
            axes.plot(*[[mean] for mean in means], marker, color=colour, label=_plain(row.label))
        axes.set(xlabel="accuracy %", ylabel="ECE %")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def reliability_figure(rows: Sequence[Row], results: Results, table: Table) -> Figure:
    """A diagram a method as trained, its seeds' test predictions together."""
    plain = [row for row in rows if row.kind == "plain"]
    columns = min(4, len(plain))
    lines = -(-len(plain) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(3.6, 2.3 * columns), 2.4 * lines), layout="constrained")
        grid = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
        for axes, row in zip(grid, plain, strict=False):
            found = results[f"{table.dataset}/{row.method}"]
            _draw(axes, _pooled(found, bins=table.bins or 1))
            axes.set_title("\n".join(wrap(_plain(row.label), TITLE)), fontsize=9)
        for axes in grid[len(plain) :]:
            axes.set_axis_off()
        figure.supxlabel("confidence", fontsize=9)
        figure.supylabel("accuracy", fontsize=9)
        figure.suptitle("orange: overconfident by, grey: underconfident by", fontsize=8)
    return figure


def _pooled(found: Mapping[int, Result], *, bins: int) -> ReliabilityBins:
    logits, targets = zip(*(result.predictions("test") for result in found.values()), strict=True)
    return reliability_bins(torch.cat(logits), torch.cat(targets), bins=bins)


def _draw(axes: Axes, bins: ReliabilityBins) -> None:
    width = 1 / len(bins.count)
    for place, (count, accuracy, gap) in enumerate(
        zip(bins.count.tolist(), bins.accuracy.tolist(), bins.gap.tolist(), strict=True)
    ):
        if count:
            strength = 1.0 if count >= FEW else 0.35
            left: Any = {"x": place * width, "width": 0.94 * width, "align": "edge", "linewidth": 0}
            axes.bar(height=accuracy, color=LIGHT.first, alpha=0.75 * strength, **left)
            colour = LIGHT.second if gap > 0 else LIGHT.muted
            axes.bar(height=gap, bottom=accuracy, color=colour, alpha=0.6 * strength, **left)
    axes.plot([0, 1], [0, 1], color=LIGHT.ink, linestyle=":", linewidth=1)
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))


def _intervals(row: Row, results: Results, table: Table) -> dict[int, Sequence[float]]:
    """95 % bootstrap intervals of ECE by seed, where they were measured."""
    found = {}
    for seed, result in results[f"{table.dataset}/{row.method}"].items():
        if row.kind == "plain":
            measures = result.row.get("intervals", {})
        else:
            measures = result.row.get("posthoc_intervals", {}).get(row.kind, {})
        if ECE.key in measures:
            found[seed] = measures[ECE.key]
    return found


def _spread_out(count: int) -> list[float]:
    """Heights about 0, so that dots do not hide each other."""
    return [0.0] if count == 1 else [0.3 * (place / (count - 1) - 0.5) for place in range(count)]


def _plain(text: str) -> str:
    """A label in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
