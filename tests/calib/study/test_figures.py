"""The figures show the figures."""

import pytest

from calib.study import cells_of, read_results
from calib.study.figures import ece_figure, reliability_figure
from calib.study.table import make_tables
from tests.calib.study.studied import write_run


@pytest.fixture
def drawn(make_study, tmp_path):
    study = make_study("seeds=[0, 1]", "methods.ls.name=LS $x$")
    cells = cells_of(study)
    for cell, shift in zip(cells[:2], (0.0, 0.05), strict=True):
        figures = {seed: {"plain": {"ece": 0.1 * (seed + 1) + shift}} for seed in (0, 1)}
        intervals = {"intervals": {"ece": [0.05, 0.25]}} if cell.method == "ls" else {}
        write_run(cell, tmp_path, figures, **intervals)
    return study, cells, tmp_path


def test_means_spreads_seeds_and_intervals_are_drawn(drawn):
    study, cells, out = drawn
    results = read_results(cells, out)
    (table,) = make_tables(study, results, "test")
    rows = [row for row in table.rows if row.values]
    (axes,) = ece_figure(rows, results, table).axes
    ends = [bar.lines[2][0].get_segments()[0][:, 0].tolist() for bar in axes.containers]
    deviation = 50**0.5  # of 10 and 20, and of 15 and 25
    for mean, found in zip((15, 20), ends, strict=True):
        assert found == pytest.approx([mean - deviation, mean + deviation])
    lines = {line.get_marker(): [] for line in axes.lines}
    for line in axes.lines:
        lines[line.get_marker()] += list(line.get_xdata())
    assert lines["D"] == pytest.approx([15, 20])
    assert lines["o"] == pytest.approx([10, 20, 15, 25])
    assert lines["None"] == pytest.approx([5, 25, 5, 25])  # the intervals of both seeds of LS
    assert [text.get_text() for text in axes.get_yticklabels()] == ["CE", r"LS \$x\$"]


def test_reliability_is_over_all_seeds_together(drawn):
    study, cells, out = drawn
    results = read_results(cells, out)
    (table,) = make_tables(study, results, "test")
    figure = reliability_figure([row for row in table.rows if row.values], results, table)
    assert [axes.get_title() for axes in figure.axes] == ["CE", r"LS \$x\$"]
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    assert len(heights) >= 10
    many = [row for row in table.rows if row.values] * 3  # six diagrams leave two places empty
    shown = [axes.axison for axes in reliability_figure(many, results, table).axes]
    assert shown == [True] * 6 + [False] * 2
    assert all(-1 <= height <= 1 for height in heights)
