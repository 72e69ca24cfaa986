"""The figures show the measured values."""

from pathlib import Path

import pytest

from semix.calib.figures import ece_figure, pooled_bins, reliability_figure
from semix.calib.results import load_methods
from semix.calib.study import cells_of
from semix.calib.study_results import make_tables, read_results
from semix.data.errors import InputError
from tests.calib.measured import write_run


@pytest.fixture
def methods(make_study, tmp_path):
    study = make_study("seeds=[0, 1]", "methods.ls.name=LS $x$")
    cells = cells_of(study)
    for cell, shift in zip(cells[:2], (0.0, 0.05), strict=True):
        values = {seed: {"plain": {"ece": 0.1 * (seed + 1) + shift}} for seed in (0, 1)}
        intervals = {"intervals": {"plain": {"ece": [0.05, 0.25]}}} if cell.method == "ls" else {}
        write_run(cell, tmp_path, values, **intervals)
    (table,) = make_tables(study, read_results(cells, tmp_path), "test")
    return [row.method for row in table.rows if row.units]


def test_means_spreads_seeds_and_intervals_are_drawn(methods):
    (axes,) = ece_figure(methods).axes
    ends = [bar.lines[2][0].get_segments()[0][:, 0].tolist() for bar in axes.containers]
    deviation = 50**0.5  # of 10 and 20, and of 15 and 25
    for mean, bounds in zip((15, 20), ends, strict=True):
        assert bounds == pytest.approx([mean - deviation, mean + deviation])
    lines = {line.get_marker(): [] for line in axes.lines}
    for line in axes.lines:
        lines[line.get_marker()] += list(line.get_xdata())
    assert lines["D"] == pytest.approx([15, 20])
    assert lines["o"] == pytest.approx([10, 20, 15, 25])
    assert lines["None"] == pytest.approx([5, 25, 5, 25])  # the intervals of both seeds of LS
    assert [text.get_text() for text in axes.get_yticklabels()] == ["CE", r"LS \$x\$"]


def test_reliability_is_over_all_seeds_together(methods):
    figure = reliability_figure(methods)
    assert [axes.get_title() for axes in figure.axes] == ["CE", r"LS \$x\$"]
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    assert len(heights) >= 10
    # Six diagrams leave two of the eight axes empty.
    shown = [axes.axison for axes in reliability_figure(methods * 3).axes]
    assert shown == [True] * 6 + [False] * 2
    assert all(-1 <= height <= 1 for height in heights)


def test_pooled_bins_hold_every_seed(runs: list[Path]):
    ce = load_methods(runs)[0]
    plain, scaled = pooled_bins(ce, "plain"), pooled_bins(ce, "scaled")
    assert int(plain.count.sum()) == int(scaled.count.sum()) == 6
    assert int(plain.count[-1]) == 2  # softmax(3, 0) = 0.953 in each of the two seeds
    assert int(scaled.count[-1]) == 0  # temperatures 1.5 and 2.5 leave 0.881 and 0.769


def test_logits_that_are_gone(runs: list[Path]):
    (runs[0] / "seed-1/logits-base.safetensors").unlink()
    with pytest.raises(InputError, match=r"logits = .*seed-1/logits-base\.safetensors: missing"):
        pooled_bins(load_methods(runs)[0], "plain")
