"""What runs measured as a Markdown table, and links to the pages that were written."""

import socket
from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from data.printable import markdown_text
from flows.artifacts.publishing import only_shown


def result_table(runs: Sequence[Path], *, key: str) -> None:
    """Show what some measured runs reached."""
    with only_shown():
        from calib.tables import as_markdown, overview, summary_table

        table = overview(summary_table(runs))
        text = f"{as_markdown(table)}\n\n{markdown_text(table.note)}"
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


def _on_this_machine(what: object) -> str:
    return markdown_text(f"{what} on {socket.gethostname()}")
