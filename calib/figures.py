"""Figures: CLIP weights and reliability diagrams for the page, results of a study as PNG."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from semix.calib.metrics import ReliabilityBins, reliability_bins
from semix.calib.metrics.selective import risk_at_coverages
from semix.calib.results import MethodResult
from semix.calib.shown_measures import ACCURACY, ECE, NLL, Summary
from semix.data.pages import DARK, LIGHT, Theme
from semix.data.quality import WeightCurve

MIN_COUNT = 20  # bins with fewer predictions are pale: their accuracy is mostly chance
STYLE: Any = {  # matplotlib's types list every key
    "font.family": ["sans-serif"],
    "font.size": 9,
    "svg.fonttype": "none",  # keep text as text: smaller, sharper, and in the reader's font
    "svg.hashsalt": "semix",  # so that equal numbers give equal bytes
    "axes.spines.top": False,
    "axes.spines.right": False,
}
DPI = 150
TITLE_WIDTH = 22  # characters per line, above a small diagram
COVERAGES = np.linspace(0.01, 1, 100)
# Okabe and Ito's colours that can be read on light and on dark; the baseline has that of the text.
DISTINCT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES = ("-", "--", ":", "-.")
LEGEND_ROWS = 8
MARKERS = "Ds^v" * 8  # each serves twenty colours, before they repeat


# Figures of the page: SVG, one per theme


@dataclass(frozen=True)
class Picture:
    """A figure in a light and in a dark theme, as data URIs."""

    light: str
    dark: str


def weight_figure(curve: WeightCurve) -> Picture:
    """Plot mean and quantiles of the CLIP weight at each alpha."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        x = curve.alphas.numpy()
        low, quarter, middle, three_quarters, high = curve.quantiles.numpy()
        axes.plot([0, 1], [0, 1], color=theme.muted, linestyle=":", linewidth=1.2)
        axes.fill_between(x, low, high, color=theme.first, alpha=0.15, linewidth=0)
        axes.fill_between(x, quarter, three_quarters, color=theme.first, alpha=0.30, linewidth=0)
        axes.plot(x, middle, color=theme.first, linewidth=1.2, linestyle="--")
        axes.plot(x, curve.mean.numpy(), color=theme.first, linewidth=2.2, marker="o", markersize=4)
        axes.set_xlabel("alpha: conditioning weight of the first class")
        axes.set_ylabel("CLIP weight of the first class")
        _set_colours(axes, theme)

    return _both_themes(draw, width=5.4, height=3.5)


def rounds_picture(curves: Mapping[str, Sequence[MethodResult]]) -> Picture:
    """Plot measures by round, one line per way of adding images; bands are deviations over seeds.

    Args:
        curves: the method of each round, from round 0 on, by the name of its line.
    """
    panels = [(ACCURACY, "plain"), (ECE, "plain"), (NLL, "plain"), (NLL, "scaled")]

    def draw(figure: Figure, theme: Theme) -> None:
        for axes, (measure, kind) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            colours = (theme.first, theme.second)
            for (name, methods), colour in zip(curves.items(), colours, strict=True):
                summaries = [method.summary(measure, kind) for method in methods]
                factor = 100 if measure.percent else 1
                means = np.array([summary.mean for summary in summaries]) * factor
                spread = np.array([summary.sd or 0.0 for summary in summaries]) * factor
                x = np.arange(len(methods))
                axes.fill_between(
                    x, means - spread, means + spread, color=colour, alpha=0.15, linewidth=0
                )
                axes.plot(x, means, color=colour, marker="o", markersize=4, label=name)
            title = f"{measure.title}{' + TS' if kind == 'scaled' else ''}{measure.unit}"
            axes.set_title(title, color=theme.ink)
            axes.set_xlabel("round")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            _set_colours(axes, theme)
        figure.axes[0].legend(labelcolor=theme.ink, frameon=False)

    return _both_themes(draw, width=7.2, height=5.2)


def coverage_picture(methods: Sequence[MethodResult]) -> Picture:
    """Plot errors among the most confident test images, along their share; means over seeds.

    Args:
        methods: on the same images, as trained.
    Raises:
        InputError: a logits file is missing.
    """
    curves = {method.label: _mean_risk(method) for method in methods}

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.add_subplot()
        for index, (label, risk) in enumerate(curves.items()):
            colour = DISTINCT[index % len(DISTINCT)] if index else theme.ink
            style = LINES[index // len(DISTINCT) % len(LINES)]
            axes.plot(100 * COVERAGES, 100 * risk, style, color=colour, label=_escape(label))
        axes.set(xlabel="share of images that are answered %", ylabel="errors among them %")
        axes.set(xlim=(0, 100))
        axes.set_ylim(bottom=0)
        _set_colours(axes, theme)
        columns = -(-len(curves) // LEGEND_ROWS)
        axes.legend(labelcolor=theme.ink, frameon=False, fontsize=8, ncols=columns)

    return _both_themes(draw, width=7.2, height=4.2)


def _mean_risk(method: MethodResult) -> np.ndarray:
    """Risk at COVERAGES, the mean over seeds."""
    risks = []
    for result in method.seeds.values():
        logits, targets = result.predictions("test")
        confidence, predicted = logits.double().softmax(1).max(1)
        correct = (predicted == targets).double()
        risks.append(risk_at_coverages(confidence, correct, torch.from_numpy(COVERAGES)))
    return torch.stack(risks).mean(0).numpy()


def reliability_picture(bins: ReliabilityBins) -> Picture:
    """Plot accuracy against confidence in bins, and below it the histogram of predictions."""

    def draw(figure: Figure, theme: Theme) -> None:
        top, bottom = figure.subplots(
            2, 1, sharex=True, height_ratios=(3.2, 1), gridspec_kw={"hspace": 0.12}
        )
        _draw_gaps(top, bins, theme)
        top.set_ylabel("accuracy")
        _draw_histogram(bottom, bins, theme)
        for axes in (top, bottom):
            _set_colours(axes, theme)

    return _both_themes(draw, width=2.75, height=3.5)


def pooled_bins(method: MethodResult, kind: str = "plain") -> ReliabilityBins:
    """Reliability bins of the test predictions of all seeds, pooled.

    Args:
        kind: "plain", or "scaled": by the temperature of each seed.
    Raises:
        InputError: a logits file is missing.
    """
    logits, targets = [], []
    for row in method.seeds.values():
        seed_logits, seed_targets = row.predictions("test")
        logits.append(seed_logits / (row.temperature if kind == "scaled" else 1.0))
        targets.append(seed_targets)
    return reliability_bins(torch.cat(logits), torch.cat(targets), bins=method.bins)


def _draw_gaps(axes: Axes, bins: ReliabilityBins, theme: Theme) -> None:
    count, accuracy, gaps = (value.numpy() for value in (bins.count, bins.accuracy, bins.gap))
    left, width = _left_and_width(len(count))
    for index in np.flatnonzero(count):
        opacity = 1.0 if count[index] >= MIN_COUNT else 0.35
        bar = {"x": left[index], "width": width, "align": "edge"}
        gap = gaps[index]
        axes.bar(height=accuracy[index], color=theme.first, alpha=0.75 * opacity, **bar)
        # From accuracy to confidence: orange where overconfident, hatched where underconfident.
        colour, hatch = (theme.second, None) if gap > 0 else ("none", "/////")
        axes.bar(
            height=gap,
            bottom=accuracy[index],
            color=colour,
            edgecolor="none" if gap > 0 else theme.ink,
            hatch=hatch,
            linewidth=0,
            alpha=0.85 * opacity,
            **bar,
        )
    axes.plot([0, 1], [0, 1], color=theme.muted, linestyle=":", linewidth=1.2)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _draw_histogram(axes: Axes, bins: ReliabilityBins, theme: Theme) -> None:
    share = bins.fraction.numpy()
    left, width = _left_and_width(len(share))
    axes.bar(left, share, width=width, align="edge", color=theme.muted)
    axes.set_yscale("log")  # keeps low bars visible: most predictions have a confidence near 1
    axes.set(xlabel="confidence", ylabel="share", ylim=(1e-4, 1))
    axes.set_yticks([1e-3, 1e-1], minor=False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axes.minorticks_off()


def _left_and_width(bins: int) -> tuple[np.ndarray, float]:
    return np.arange(bins) / bins, 0.94 / bins  # a thin gap between bars


def _set_colours(axes: Axes, theme: Theme) -> None:
    axes.tick_params(colors=theme.muted, labelcolor=theme.muted, length=3)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.line)


def _both_themes(draw: Callable[[Figure, Theme], None], *, width: float, height: float) -> Picture:
    """Draw a figure in both themes; `width` and `height` in inches."""

    def render(theme: Theme) -> str:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(width, height), layout="constrained")
            draw(figure, theme)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

    return Picture(light=render(LIGHT), dark=render(DARK))


# Figures of a study: PNG


def write_figures(methods: Sequence[MethodResult], folder: Path, *, dataset: str) -> list[str]:
    """Write three PNG files with the results on one dataset.

    Returns:
        The names of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        f"ece-{dataset}.png": ece_figure,
        f"accuracy-ece-{dataset}.png": accuracy_figure,
        f"reliability-{dataset}.png": reliability_figure,
    }
    for name, draw in figures.items():
        with matplotlib.rc_context(STYLE):
            draw(methods).savefig(folder / name, dpi=DPI, metadata={"Software": None})
    return list(figures)


def ece_figure(methods: Sequence[MethodResult]) -> Figure:
    """Plot the ECE of each method: mean and deviation, and seeds with their intervals."""
    figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(methods)), layout="constrained")
    axes = figure.add_subplot()
    for position, method in enumerate(methods):
        values = method.values(ECE)
        summary = Summary.of(values.values())
        deviation = 100 * (summary.sd or 0.0)
        axes.errorbar(
            100 * summary.mean, position, xerr=deviation, fmt="D", color=LIGHT.ink, capsize=3
        )
        for seed, offset in zip(values, _vertical_offsets(len(values)), strict=True):
            axes.plot(100 * values[seed], position + offset, "o", color=LIGHT.first, markersize=4)
            limits = method.seeds[seed].intervals.get(method.kind, {}).get(ECE.key)
            if limits:
                ends = [100 * limit for limit in limits]
                axes.plot(ends, [position + offset] * 2, color=LIGHT.first, alpha=0.4)
    axes.set_yticks(range(len(methods)), [_escape(method.label) for method in methods])
    axes.invert_yaxis()
    axes.set_xlabel(f"ECE % ({methods[0].bins} bins)")
    axes.set_xlim(left=0)
    _set_colours(axes, LIGHT)
    legend = "black: mean ± standard deviation; dots: seeds with 95 % bootstrap intervals"
    figure.suptitle(legend, fontsize=8)
    return figure


def accuracy_figure(methods: Sequence[MethodResult]) -> Figure:
    """Plot ECE against accuracy: the mean of each method, and its seeds as small dots."""
    height = max(4.4, 0.5 + 0.18 * len(methods))  # the legend has one line per method
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for index, method in enumerate(methods):
        colour, marker = colours[index % len(colours)], MARKERS[index // len(colours)]
        points = [
            [100 * value for value in method.values(measure).values()]
            for measure in (ACCURACY, ECE)
        ]
        axes.plot(*points, "o", color=colour, markersize=3, alpha=0.6)
        means = [sum(values) / len(values) for values in points]
        axes.plot(*[[mean] for mean in means], marker, color=colour, label=_escape(method.label))
    axes.set(xlabel="accuracy %", ylabel="ECE %")
    axes.set_ylim(bottom=0)
    _set_colours(axes, LIGHT)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def reliability_figure(methods: Sequence[MethodResult]) -> Figure:
    """Plot a reliability diagram per method as trained, of the test predictions of all seeds."""
    plain = [method for method in methods if method.kind == "plain"]
    columns = min(4, len(plain))
    grid_rows = -(-len(plain) // columns)
    figure = Figure(figsize=(max(3.6, 2.3 * columns), 2.4 * grid_rows), layout="constrained")
    grid = list(figure.subplots(grid_rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes, method in zip(grid, plain, strict=False):
        _draw_gaps(axes, pooled_bins(method), LIGHT)
        axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        axes.set_title("\n".join(wrap(_escape(method.label), TITLE_WIDTH)), fontsize=9)
        _set_colours(axes, LIGHT)
    for axes in grid[len(plain) :]:
        axes.set_axis_off()
    figure.supxlabel("confidence", fontsize=9)
    figure.supylabel("accuracy", fontsize=9)
    figure.suptitle("orange: overconfident by, hatched: underconfident by", fontsize=8)
    return figure


def _vertical_offsets(count: int) -> list[float]:
    """Vertical offsets around 0, so that dots do not cover each other."""
    return [0.0] if count == 1 else [0.3 * (index / (count - 1) - 0.5) for index in range(count)]


def _escape(text: str) -> str:
    """Escape dollar signs, which begin a formula in matplotlib."""
    return text.replace("$", r"\$")
