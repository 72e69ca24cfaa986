"""semix build, resume, extend, status."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import (
    Config,
    Json,
    RetryFailed,
    Set,
    Shards,
    SkipFailed,
    Slots,
    Url,
    chosen,
)
from flows.costs import SHARE
from flows.terminal import emit_facts

if TYPE_CHECKING:
    from data.root import Root


def build(
    config: Config,
    out: Annotated[str, typer.Option(help="root of the mixed dataset: a path or URL")],
    set_: Set = [],  # noqa: B006 - typer copies it
    slots: Slots = 0,
    shards: Shards = "",
    retry_failed: RetryFailed = False,
    skip_failed: SkipFailed = "",
    check: Annotated[bool, typer.Option(help="validate, estimate, and make nothing")] = False,
    time: Annotated[bool, typer.Option("--time", help="check, and time a warm batch")] = False,
    share: Annotated[float, typer.Option(help="of the device's rate, for the estimate")] = SHARE,
    rate: Annotated[float | None, typer.Option(help="TFLOP/s of the device; else measured")] = None,
    device: Annotated[str, typer.Option(help="for the estimate: auto, cpu, cuda")] = "auto",
    json: Json = False,
) -> None:
    """Start a mixed dataset, or continue it."""
    from data.settings import load_settings
    from flows import build as building
    from flows.selection import Selection
    from pipeline.config import BuildConfig

    selection = Selection(chosen(shards), retry_failed, skip_failed)
    settings = load_settings(BuildConfig, config, set_)
    if check or time:
        from flows.cost_words import readable

        facts = building.check(settings, out, share=share, rate=rate, device=device, time=time)
        emit_facts(facts if json else readable(facts), as_json=json)
        return
    show(building.build(settings, out, slots=slots or None, selection=selection), json)


def resume(
    url: Url,
    slots: Slots = 0,
    shards: Shards = "",
    retry_failed: RetryFailed = False,
    skip_failed: SkipFailed = "",
    full: Annotated[bool, typer.Option("--full", help="first read every byte and image")] = False,
    json: Json = False,
) -> None:
    """Make what a mixed dataset lacks, and again what is damaged, from its root alone."""
    from data.root import Root
    from flows import build as building
    from flows.selection import Selection

    selection = Selection(chosen(shards), retry_failed, skip_failed)
    root = Root(url)
    show(building.resume(root, slots=slots or None, selection=selection, full=full), json)


def extend(
    where: Annotated[str, typer.Argument(help="root; or with --out a YAML file")],
    groups_per_pair: Annotated[int, typer.Option(help="series of each pair from now on")] = 0,
    out: Annotated[str, typer.Option(help="root, where a YAML file says how many")] = "",
    slots: Slots = 0,
    json: Json = False,
) -> None:
    """Add series behind the last ones of a mixed dataset, and make them."""
    from data.errors import InputError
    from data.root import Root
    from data.settings import load_settings
    from flows import build as building
    from pipeline.config import BuildConfig

    if bool(out) == bool(groups_per_pair):
        remedy = "give a root and --groups-per-pair, or a config file and --out"
        raise InputError("extend", where, remedy)
    if out:
        settings = load_settings(BuildConfig, Path(where))
        show(building.extend_to(settings, out, slots=slots or None), json)
    else:
        show(building.extend(Root(where), groups_per_pair, slots=slots or None), json)


def status(url: Url, json: Json = False) -> None:
    """What is done, missing and failed, from the store alone."""
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
    emit_facts(facts, as_json=as_json)
