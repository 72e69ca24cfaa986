"""Facts as a table artifact, one a row."""

from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_table_artifact

from flows.artifacts.publishing import only_shown


def facts_table(facts: Mapping[str, Any], *, key: str, description: str) -> None:
    """Show facts by name; empty ones are left out."""
    with only_shown():
        rows = [
            {"what": name.replace("_", " "), "value": str(value)}
            for name, value in facts.items()
            if value not in (None, "")
        ]
        create_table_artifact(rows, key=key, description=description)
