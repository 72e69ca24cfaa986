"""semix build, resume, status."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import Config, Json, Set, Shards, Slots, Url, chosen
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
    from pipeline.config import BuildConfig

    settings = load_settings(BuildConfig, config, set_)
    if check or time:
        from flows.cost_words import readable

        facts = building.check(settings, out, share=share, rate=rate, device=device, time=time)
        emit_facts(facts if json else readable(facts), as_json=json)
        return
    show(building.build(settings, out, slots=slots or None, shards=chosen(shards)), json)


def resume(url: Url, slots: Slots = 0, shards: Shards = "", json: Json = False) -> None:
    """Make what a mixed dataset lacks, from its root alone."""
    from data.root import Root
    from flows import build as building

    show(building.resume(Root(url), slots=slots or None, shards=chosen(shards)), json)


def status(url: Url, json: Json = False) -> None:
    """What is done, missing and failed, from the store alone."""
    from data.root import Root

    show(Root(url), json)


def show(root: "Root", as_json: bool) -> None:
    """How far a root is, and how fast it went."""
    from flows.progress import by_stage, standing

    found = root.progress()
    facts = {**root.status(), **standing(found)}
    if not as_json:
        facts["stages"] = by_stage(found.stages)
    emit_facts(facts, as_json=as_json)
