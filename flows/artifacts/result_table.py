"""What runs measured as a Markdown table, and links to the pages that were written."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from data.printable import markdown_text
from flows.artifacts.publishing import only_shown

# Title, kind of row, measure, factor; as in the table that a terminal shows.
COLUMNS = (
    ("accuracy %", "plain", "accuracy", 100),
    ("ECE %", "plain", "ece", 100),
    ("ECE % + TS", "scaled", "ece", 100),
    ("NLL", "plain", "nll", 1),
    ("NLL + TS", "scaled", "nll", 1),
)


def result_table(runs: Sequence[Path], *, key: str) -> None:
    """Show what some measured runs reached."""
    with only_shown():
        from calib.report.tables import summary_table

        text = as_markdown(summary_table(runs))
        create_markdown_artifact(text, key=f"{key}-results", description="on test images")


def markdown_file(page: Path, *, key: str) -> None:
    """Show a Markdown file but its figures, which are files beside it."""
    with only_shown():
        lines = [line for line in page.read_text().splitlines() if not line.startswith("![](")]
        text = "\n".join([*lines, "", _on_this_machine(f"With figures: {page}")])
        create_markdown_artifact(text, key=f"{key}-results", description=page.stem)


def link_to(page: Path, *, key: str) -> None:
    """A link to a page on the machine of the flow."""
    with only_shown():
        text = f"{_on_this_machine(page)}; browsers open it there only"
        link = page.absolute().as_uri()
        create_link_artifact(link, page.name, key=f"{key}-page", description=text)


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `summary_table` returned, as a Markdown table."""
    lines = [
        "| " + " | ".join(["method", *(title for title, *_ in COLUMNS)]) + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for row in rows:
        cells = [_spread(row[kind][measure], factor) for _, kind, measure, factor in COLUMNS]
        lines.append("| " + " | ".join([markdown_text(row["method"]), *cells]) + " |")
    bins = " / ".join(sorted({str(row["bins"]) for row in rows}))
    seeds = " / ".join(sorted({str(row["seeds"]) for row in rows}))
    note = f"Mean ± standard deviation over seeds ({seeds}); TS: after temperature scaling"
    return "\n".join([*lines, "", markdown_text(f"{note}; ECE: {bins} bins")])


def _on_this_machine(what: object) -> str:
    return markdown_text(f"{what} on {socket.gethostname()}")


def _spread(found: Mapping[str, float | None], factor: int) -> str:
    digits = 2 if factor == 100 else 3
    parts = [part for part in (found["mean"], found["sd"]) if part is not None]
    return " ± ".join(f"{factor * part:.{digits}f}" for part in parts)
