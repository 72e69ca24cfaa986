"""Numbers as shapes for the page: bars of a histogram, and the weight along alpha."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 520, 300  # units of the drawing; the page scales it
LEFT, BOTTOM, TOP, RIGHT = 36, 26, 8, 16  # room for axis numbers
TICKS = 4


@dataclass(frozen=True)
class Bar:
    """One bin, and how high it stands against the highest, in percent."""

    low: float
    high: float
    count: int
    height: float


@dataclass(frozen=True)
class Curve:
    """Points of an SVG polygon or polyline each, and where the axis numbers stand."""

    width: int
    height: int
    bands: list[str]
    median: str
    mean: str
    marks: list[tuple[float, float]]
    identity: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def bars(found: dict[str, Any]) -> list[Bar]:
    """The bars of what `figures.histogram` gave."""
    edges, counts = found["edges"], found["counts"]
    most = max(max(counts), 1)
    return [
        Bar(low, high, count, 100 * count / most)
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def curve(found: dict[str, Any]) -> Curve:
    """The weight along alpha: mean, median, and the bands between outer quantiles."""
    alphas, quantiles = found["alphas"], found["quantiles"]
    values = [value for row in quantiles for value in row] + [0.0, 1.0]
    low, high = min(values), max(values)

    def x(alpha: float) -> float:
        return round(LEFT + alpha * (WIDTH - LEFT - RIGHT), 1)

    def y(weight: float) -> float:
        return round(HEIGHT - BOTTOM - (weight - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    def line(row: Sequence[float]) -> list[tuple[float, float]]:
        return [(x(alpha), y(weight)) for alpha, weight in zip(alphas, row, strict=True)]

    middle = len(quantiles) // 2
    outer = zip(quantiles[:middle], reversed(quantiles[middle + 1 :]), strict=True)
    steps = [low + (high - low) * tick / TICKS for tick in range(TICKS + 1)]
    return Curve(
        width=WIDTH,
        height=HEIGHT,
        bands=[_points([*line(under), *reversed(line(over))]) for under, over in outer],
        median=_points(line(quantiles[middle])),
        mean=_points(line(found["mean"])),
        marks=line(found["mean"]),
        identity=_points([(x(0), y(0)), (x(1), y(1))]),
        x_ticks=[(x(tick / TICKS), f"{tick / TICKS:.2f}") for tick in range(TICKS + 1)],
        y_ticks=[(y(step), f"{step:.2f}") for step in steps],
    )


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
