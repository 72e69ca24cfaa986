"""semix relabel."""

from typing import Annotated

import typer

from flows.commands.options import Cluster, Device, Json, Runner, Slots, Url, setting
from flows.slots import SlotSettings
from flows.terminal import emit, emit_facts, emit_json


def relabel(
    url: Url,
    set_: Annotated[list[str], setting("annotation.scale=4")] = [],  # noqa: B006 - typer copies it
    list_: Annotated[bool, typer.Option("--list", help="show the label sets that are there")] = (
        False
    ),
    out: Annotated[
        str, typer.Option(metavar="ROOT", help="a new one to bake the labels into")
    ] = "",
    slots: Slots = 0,
    runner: Runner = "local",
    cluster: Cluster = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Further labels for the same images; or continue them.

    Example:
      semix relabel /data/birds-mixed --set annotation.scale=2
    """
    from data.root import Root
    from flows import relabel as relabelling

    root = Root(url)
    if not list_:
        where = SlotSettings(slots, runner, cluster, device=device)
        found = relabelling.relabel(root, set_, slots=where, out=out)
        emit_facts(found, as_json=json)
        return
    sets = relabelling.listed(root)
    if json:
        emit_json(sets)
        return
    for facts in sets:
        emit(
            "{digest:.12}  {done} of {shards} shards  {rule}, scale {scale}, {encoder}".format(
                **facts
            )
        )
    if not sets:
        emit("no label sets; make one with --set annotation.KEY=VALUE")
