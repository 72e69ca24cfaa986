"""semix deploy."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.help_pages import MORE
from flows.commands.options import Device, Json
from flows.terminal import emit, emit_json

if TYPE_CHECKING:
    from flows.deployments import Registered


def deploy(
    pool: Annotated[str, typer.Option(metavar="NAME", help="work pool that runs them")] = "semix",
    type: Annotated[
        str,
        typer.Option(
            metavar="TYPE", help="of the pool: process, docker, kubernetes; default: the pool's"
        ),
    ] = "",
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="of docker and kubernetes pools' containers")
    ] = "",
    create_pool: Annotated[
        bool, typer.Option("--create-pool", help="make the work pool if there is none")
    ] = False,
    automations: Annotated[
        bool,
        typer.Option("--automations", help="resume builds that fail, find runs that died"),
    ] = False,
    flow: Annotated[
        list[str],
        typer.Option(
            metavar="FLOW", help="build, relabel, train, evaluate, study, quickstart; default: all"
        ),
    ] = [],  # noqa: B006 - typer copies it
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="of the deployments; default: the pool's", rich_help_panel=MORE
        ),
    ] = "",
    schedule: Annotated[
        list[str], typer.Option(metavar="CRON", help='with one --flow, as "0 2 * * *"')
    ] = [],  # noqa: B006
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="of schedules")] = "UTC",
    limit: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="runs of one deployment at a time; default: any number",
            show_default=False,
        ),
    ] = 0,
    queue: Annotated[str, typer.Option(metavar="NAME", help="work queue of the pool")] = "",
    device: Device = "auto",
    set_parameter: Annotated[
        list[str], typer.Option(metavar="KEY=VALUE", help="what runs get unless told otherwise")
    ] = [],  # noqa: B006
    job_variable: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="for the pool's base job template, as gpus=8"),
    ] = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Register the flows as Prefect deployments, or update them.

    Example:
      semix deploy --create-pool --automations
    """
    from flows import deployments
    from flows.deployments.settings import pairs

    settings = deployments.DeploySettings(
        pool=pool,
        type=type,
        flows=tuple(flow),
        name=name,
        queue=queue,
        image=image,
        device=device,
        parameters=pairs("--set-parameter", set_parameter),
        job_variables=pairs("--job-variable", job_variable),
        schedules=tuple(schedule),
        timezone=timezone,
        limit=limit,
        create_pool=create_pool,
    )
    found = deployments.deploy(settings)
    done = _automations() if automations else {}
    if json:
        emit_json({"deployments": [asdict(one) for one in found], "automations": done})
    else:
        emit("\n".join(_readable(found, done)))


def _automations() -> dict[str, str]:
    from prefect.client.orchestration import get_client

    from flows.deployments.automations import ensure_automations

    with get_client(sync_client=True) as client:
        return ensure_automations(client)


def _readable(found: "list[Registered]", automations: dict[str, str]) -> list[str]:
    rows = [("deployment", "pool", "type", "schedule", "")]
    rows += [
        (one.name, one.pool, one.type, ", ".join(one.schedules) or "none", one.done)
        for one in found
    ]
    lines = _table(rows)
    if automations:
        lines += ["", *_table([("automation", ""), *automations.items()])]
    pool, kind = found[0].pool, found[0].type
    return [
        *lines,
        "",
        "a worker, on each machine that shall run them:",
        f"  prefect worker start --pool {pool} --type {kind}",
        "a run, with your own places:",
        *(f"  {one.run}" for one in found),
    ]


def _table(rows: list[Any]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
