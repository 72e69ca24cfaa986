"""The figures of the page: weight along alpha, and reliability diagrams."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from calib.metrics import ReliabilityBins
from data.pages import DARK, LIGHT, Theme
from data.quality import WeightCurve

FEW = 20  # predictions; a bin with fewer is drawn pale, as its accuracy is mostly chance
STYLE: Any = {  # matplotlib types its keys one by one
    "font.family": ["sans-serif"],
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: smaller, sharper, and in the reader's own font
    "svg.hashsalt": "semix",  # the same numbers give the same bytes
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Picture:
    """One figure twice, as data URIs: for light and for dark pages."""

    light: str
    dark: str


def weight_figure(curve: WeightCurve) -> Picture:
    """Mean and quantiles of the CLIP weight at each alpha."""

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
        _colour(axes, theme)

    return _both_themes(draw, width=5.4, height=3.5)


def reliability_figure(bins: ReliabilityBins) -> Picture:
    """Accuracy against confidence in each bin; below, how the predictions spread over them."""

    def draw(figure: Figure, theme: Theme) -> None:
        top, bottom = figure.subplots(
            2, 1, sharex=True, height_ratios=(3.2, 1), gridspec_kw={"hspace": 0.12}
        )
        _draw_gaps(top, bins, theme)
        _draw_histogram(bottom, bins, theme)
        for axes in (top, bottom):
            _colour(axes, theme)

    return _both_themes(draw, width=2.75, height=3.5)


def _draw_gaps(axes: Axes, bins: ReliabilityBins, theme: Theme) -> None:
    count, accuracy, gaps = (value.numpy() for value in (bins.count, bins.accuracy, bins.gap))
    left, width = _left_and_width(len(count))
    for index in np.flatnonzero(count):
        strength = 1.0 if count[index] >= FEW else 0.35
        place = {"x": left[index], "width": width, "align": "edge"}
        gap = gaps[index]
        axes.bar(height=accuracy[index], color=theme.first, alpha=0.75 * strength, **place)
        # Orange from accuracy up to confidence: overconfident. Hatched blue down to confidence:
        # underconfident.
        colour, hatch = (theme.second, None) if gap > 0 else ("none", "/////")
        axes.bar(
            height=gap,
            bottom=accuracy[index],
            color=colour,
            edgecolor="none" if gap > 0 else theme.ink,
            hatch=hatch,
            linewidth=0,
            alpha=0.85 * strength,
            **place,
        )
    axes.plot([0, 1], [0, 1], color=theme.muted, linestyle=":", linewidth=1.2)
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")


def _draw_histogram(axes: Axes, bins: ReliabilityBins, theme: Theme) -> None:
    share = bins.share.numpy()
    left, width = _left_and_width(len(share))
    axes.bar(left, share, width=width, align="edge", color=theme.muted)
    axes.set_yscale("log")  # most predictions are near 1; the others must still be seen
    axes.set(xlabel="confidence", ylabel="share", ylim=(1e-4, 1))
    axes.set_yticks([1e-3, 1e-1], minor=False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axes.minorticks_off()


def _left_and_width(bins: int) -> tuple[np.ndarray, float]:
    return np.arange(bins) / bins, 0.94 / bins  # a thin gap between bars


def _colour(axes: Axes, theme: Theme) -> None:
    axes.tick_params(colors=theme.muted, labelcolor=theme.muted, length=3)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.line)


def _both_themes(draw: Callable[[Figure, Theme], None], *, width: float, height: float) -> Picture:
    """Draw once for each theme; `width` and `height` in inches."""

    def render(theme: Theme) -> str:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(width, height), layout="constrained")
            draw(figure, theme)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

    return Picture(light=render(LIGHT), dark=render(DARK))
