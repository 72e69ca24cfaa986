"""The table of a study's mixed datasets: means per build, and changes with intervals."""

import pandas
import pytest

from semix.calib.study_mixed import MIXED_CSV, mixed_table, read_mixed


def line(build: str, split: int, draw: int, **values: float) -> dict[str, object]:
    defaults = dict.fromkeys(
        ["images", "stability", "candidates_stability", "diversity", "end_points", "spearman"]
    )
    keys = {"dataset": "digits", "build": build, "split": split, "draw": draw}
    return {**keys, **defaults, **values}


def test_builds_are_compared_draw_by_draw(tmp_path):
    lines = [
        line(build, split, draw, diversity=0.1 + 0.01 * split + gain, end_points=0.9)
        for build, gain in (("random", 0.0), ("stable", -0.02))
        for split in (0, 1)
        for draw in (0, 1)
    ]
    assert read_mixed(tmp_path) is None
    pandas.DataFrame(lines).to_csv(tmp_path / MIXED_CSV, index=False)
    frame = read_mixed(tmp_path)
    assert frame is not None
    table = mixed_table(frame)
    rows = {row.label: dict(zip(table.columns, row.cells, strict=True)) for row in table.rows}
    assert list(rows) == ["digits, random", "digits, stable"]
    first, second = (rows[label] for label in rows)
    assert str(first["stability of the noises"]) == "\N{EN DASH}"
    assert first["diversity"].text == "0.1050"
    assert float(first["diversity"].note.removeprefix("± ")) == pytest.approx(0.0058, abs=1e-4)
    assert second["diversity"].note.endswith("change -0.0200 [-0.0200, -0.0200]")
