"""Facts as a table artifact, one a row."""

from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_table_artifact

from data.printable import markdown_text
from flows.artifacts.publishing import only_shown


def facts_table(facts: Mapping[str, Any], *, key: str, description: str) -> None:
    """Show facts by name; empty ones are left out.

    Prefect's pages take the cells of a table for Markdown, and so its description.

    Args:
        facts: names and values that are shown as they are.
        description: in Markdown.
    """
    with only_shown():
        rows = [
            {
                "what": markdown_text(name.replace("_", " ")),
                "value": markdown_text(str(value)),
            }
            for name, value in facts.items()
            if value not in (None, "")
        ]
        create_table_artifact(rows, key=key, description=description)
