"""semix build, resume, extend, status."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import (
    Cluster,
    Config,
    Device,
    Full,
    Json,
    Range,
    RetryFailed,
    Runner,
    Set,
    Shards,
    SkipFailed,
    Slots,
    Url,
    chosen,
    setting,
)
from flows.costs import SHARE, readable
from flows.slots import SlotSettings
from flows.terminal import emit_facts

if TYPE_CHECKING:
    from data.root import Root


def build(
    config: Config,
    out: Annotated[str, typer.Option(metavar="ROOT", help="of the mixed dataset: a path or URL")],
    set_: Set = [],  # noqa: B006 - typer copies it
    check: Annotated[
        bool, typer.Option("--check", help="validate, decode pictures, estimate, and make nothing")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="check, and time a warm batch")] = False,
    slots: Slots = 0,
    skip_failed: SkipFailed = "",
    runner: Runner = "local",
    cluster: Cluster = "",
    range_: Range = "",
    shards: Shards = "",
    retry_failed: RetryFailed = False,
    full: Full = False,
    device: Device = "auto",
    share: Annotated[
        float, typer.Option(metavar="FRACTION", help="of the device's rate, for the estimate")
    ] = SHARE,
    rate: Annotated[
        float | None, typer.Option(metavar="TFLOPS", help="of the device; default: measured")
    ] = None,
    json: Json = False,
) -> None:
    """Start a mixed dataset, or continue it.

    Example:
      semix build birds.yaml --out /data/birds-mixed
    """
    from flows import build as building
    from flows.build_steps import Selection

    selection = Selection(chosen(shards), retry_failed, skip_failed)
    if check or time:
        from flows.configs import load_config
        from pipeline.config import BuildConfig

        settings = load_config(BuildConfig, config, set_)
        facts = building.check(settings, out, share=share, rate=rate, device=device, time=time)
        emit_facts(facts if json else readable(facts), as_json=json)
        return
    where = SlotSettings(slots, runner, cluster, range_, device)
    root = building.build(config, out, overrides=set_, slots=where, selection=selection, full=full)
    show(root, json)


def resume(
    url: Url,
    set_: Annotated[list[str], setting("generator.model=PLACE")] = [],  # noqa: B006
    slots: Slots = 0,
    skip_failed: SkipFailed = "",
    retry_failed: RetryFailed = False,
    shards: Shards = "",
    full: Full = False,
    runner: Runner = "local",
    cluster: Cluster = "",
    range_: Range = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Make what a mixed dataset lacks, and again what is damaged.

    Of its settings only where things lie may change.

    Example:
      semix resume /data/birds-mixed
    """
    from flows import build as building
    from flows.build_steps import Selection

    selection = Selection(chosen(shards), retry_failed, skip_failed)
    where = SlotSettings(slots, runner, cluster, range_, device)
    root = building.resume(url, overrides=set_, slots=where, selection=selection, full=full)
    show(root, json)


def extend(
    root: Annotated[
        str,
        typer.Argument(metavar="WHERE", help="root; or with --out a YAML file"),
    ],
    groups_per_pair: Annotated[
        int,
        typer.Option(metavar="N", help="series of each pair from now on", show_default=False),
    ] = 0,
    out: Annotated[str, typer.Option(metavar="ROOT", help="where a YAML file says how many")] = "",
    slots: Slots = 0,
    runner: Runner = "local",
    cluster: Cluster = "",
    range_: Range = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Add series behind the last ones of a mixed dataset; make them.

    Example:
      semix extend /data/birds-mixed --groups-per-pair 8
    """
    from data.errors import InputError
    from data.root import Root
    from flows import build as building
    from flows.configs import load_config
    from pipeline.config import BuildConfig

    if bool(out) == bool(groups_per_pair):
        remedy = "give a root and --groups-per-pair, or a config file and --out"
        raise InputError("extend", root, remedy)
    where = SlotSettings(slots, runner, cluster, range_, device)
    if out:
        show(building.extend_to(load_config(BuildConfig, root), out, slots=where), json)
    else:
        show(building.extend(Root(root), groups_per_pair, slots=where), json)


def status(url: Url, json: Json = False) -> None:
    """What is done, missing and failed, from the store alone.

    Example:
      semix status /data/birds-mixed
    """
    from data.root import Root

    show(Root(url), json)


def show(root: "Root", as_json: bool) -> None:
    """How far a root is, and how fast it went."""
    from data.label_sets import label_sets
    from flows.progress import by_stage, standing

    found = root.progress()
    facts = {**root.status(), **standing(found)}
    if sets := label_sets(root):
        facts["label_sets"] = ", ".join(digest[:12] for digest in sets)
    if not as_json:
        facts["stages"] = by_stage(found.stages)
        facts["left_out"] = f"{found.left_out} series"
        if not found.left_out:
            del facts["left_out"]
    emit_facts(facts, as_json=as_json)
