"""Which series the page shows, and their pictures: the worst, the best, some of each flag."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.flags import Flag
from data.images import decode_image
from data.pages.environment import fixed
from data.pages.series import Series, series_figure
from data.shards import GroupSample
from pipeline.audit.audit import Audit

SHOWN = 6  # series a section
TITLES: dict[Flag, tuple[str, str]] = {
    "degenerate": ("Degenerate", "Flat, black, white, or with features that are no numbers."),
    "duplicate": ("Like an earlier series", "A picture of each looks like one of another series."),
    "still": ("Neighbours that do not differ", "Alpha moves and the picture stays."),
    "end_points": ("End points of another class", "By the nearest prototype of all classes."),
}


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    series: list[Series]


def gallery(audit: Audit) -> list[Section]:
    """Sections with pictures, without those that would be empty. Reads their shards again."""
    chosen = _chosen(audit)
    wanted = sorted({row for _, _, rows in chosen for row in rows})
    samples = _read(audit, wanted)
    return [
        Section(title, note, [_figure(audit, row, samples[row]) for row in rows])
        for title, note, rows in chosen
        if rows
    ]


def _chosen(audit: Audit) -> list[tuple[str, str, list[int]]]:
    """Title, note and rows of each section."""
    series, findings = audit.facts.series, audit.findings
    rho = findings.rho.numpy()
    gap = np.abs(series.coordinates - series.mixture).mean((1, 2))  # breaks ties of rho
    order = np.lexsort((gap, -rho)).tolist()
    found = [
        ("Worst series", "The weight follows alpha least.", order[: -SHOWN - 1 : -1]),
        ("Best series", "The weight follows alpha best, and is nearest to it.", order[:SHOWN]),
    ]
    differing = np.nan_to_num(series.disagreement, nan=-1).max(1)
    if (differing >= 0).any():
        most = np.argsort(-differing, kind="stable")[:SHOWN].tolist()
        found.append(("Encoders disagree", "The two CLIP models differ most.", most))
    for flag, (title, note) in TITLES.items():
        rows = np.flatnonzero(findings.flags[flag])[:SHOWN].tolist()
        found.append((title, note, _with_partners(audit, rows) if flag == "duplicate" else rows))
    return found


def _with_partners(audit: Audit, rows: Iterable[int]) -> list[int]:
    """Each duplicate behind the series that it is like."""
    alike = audit.findings.duplicates
    partner = dict(zip(alike.rows.tolist(), alike.of.tolist(), strict=True))
    both = [row for pair in ((partner[row], row) for row in rows) for row in pair]
    return list(dict.fromkeys(both))[:SHOWN]


def _read(audit: Audit, rows: Iterable[int]) -> dict[int, GroupSample]:
    series, source = audit.facts.series, audit.source
    found: dict[int, GroupSample] = {}
    by_shard = {shard["shard"]: shard for shard in source.shards}
    wanted = {int(series.group[row]): row for row in rows}
    for number in {int(series.shard[row]) for row in wanted.values()}:
        for sample in source.samples(by_shard[number]):
            row = wanted.get(sample.record["group"])
            if row is not None:
                found[row] = sample
    return found


def _figure(audit: Audit, row: int, sample: GroupSample) -> Series:
    notes = [f"\N{GREEK SMALL LETTER RHO} {fixed(float(audit.findings.rho[row]))}"]
    differing = float(np.nan_to_num(audit.facts.series.disagreement[row], nan=-1).max())
    if differing >= 0:
        notes.append(f"encoders differ by {differing:.2f}")
    images = [decode_image(content) for content in sample.images]
    return series_figure(sample.record, images, note=", ".join(notes))
