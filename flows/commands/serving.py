"""semix server."""

from typing import Annotated

import typer

from flows.terminal import emit_facts


def server(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="to listen at; default: 127.0.0.1")
    ] = "",
    port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="default: 4200", show_default=False),
    ] = 0,
    database: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="of PostgreSQL; default: SQLite in Prefect's home. Others on this machine see it "
            "here; one with a password belongs in PREFECT_SERVER_DATABASE_CONNECTION_URL",
        ),
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="check everything, start nothing")] = False,
) -> None:
    """Run a Prefect server that stays.

    Beyond the loopback it wants a key, in PREFECT_SERVER_API_AUTH_STRING.

    Example:
      semix server --port 4300
    """
    from flows.server import standing

    serving = standing.prepare(host, port, database)
    emit_facts(standing.described(serving), as_json=False)
    if not check:
        standing.start(serving)
