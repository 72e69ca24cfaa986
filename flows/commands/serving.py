"""semix server."""

from typing import Annotated

import typer

from flows.terminal import emit_facts


def server(
    host: Annotated[str, typer.Option(help="address to listen at", show_default="127.0.0.1")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, show_default="4200")] = 0,
    database: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="of PostgreSQL; others on this machine see it here, so set it by "
            "PREFECT_SERVER_DATABASE_CONNECTION_URL if it holds a password",
            show_default="SQLite in Prefect's home",
        ),
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="check everything, start nothing")] = False,
) -> None:
    """Run a Prefect server that stays; beyond the loopback with a key alone."""
    from flows.server import standing

    serving = standing.prepare(host, port, database)
    emit_facts(standing.described(serving), as_json=False)
    if not check:
        standing.start(serving)
