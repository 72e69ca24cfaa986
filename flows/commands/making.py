"""semix quickstart, build, resume, extend, relabel, export, standins."""

import shutil
import textwrap
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from semix.data.croissant import CROISSANT
from semix.data.errors import InputError
from semix.data.formats import PairWeighting
from semix.data.root import Root
from semix.flows import parameters as p
from semix.flows import prices
from semix.flows.configs import load_config
from semix.flows.costs import DEFAULT_SHARE, readable
from semix.flows.progress import show_root
from semix.flows.slots import SlotSettings
from semix.flows.terminal import emit, emit_facts, emit_json
from semix.pipeline.config import EVEN_SHARE, BuildConfig


def quickstart(
    out: p.QuickstartFolder = "quickstart", seeds: p.Seeds = 3, json: p.Json = False
) -> None:
    """Run everything once on handwritten digits; write a report.

    Example:
      semix quickstart --seeds 5
    """
    from semix.flows.quickstart import main as run

    result = run(Path(out), seeds=seeds)
    if json:
        emit_json(result)
        return
    from semix.calib.results import load_methods
    from semix.calib.tables import overview, print_table

    runs = dict.fromkeys(Path(row["run"]) for row in result["methods"])
    print_table(overview(load_methods(list(runs))))
    times = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in result["seconds"].items())
    emit(textwrap.fill(f"time went to: {times}", shutil.get_terminal_size().columns))
    emit(f"report: {result['report']}")
    emit("\n  ".join(["next, for example:", *next_commands(Path(out))]))


def next_commands(out: Path) -> list[str]:
    """Commands to try on a quickstart's folder; they write only below it."""
    mixed, trained = out / "mixed", out / "runs" / "csm"
    return [
        f"semix audit {mixed}    check whether the labels fit the images",
        f"semix show {mixed} 40 --out {out / 'series-40.png'}    draw one series",
        f"semix evaluate {trained} --set evaluation.bins=20    measure with other bins",
    ]


def build(
    config: p.Config,
    out: p.Out,
    overrides: p.BuildOverrides = [],  # noqa: B006 - typer copies it
    check: Annotated[
        bool, typer.Option("--check", help="only check settings and images and estimate the cost")
    ] = False,
    time: Annotated[
        bool, typer.Option("--time", help="as --check, and time one batch of images")
    ] = False,
    slots: p.Slots = 0,
    skip_failed: p.SkipFailed = "",
    runner: p.Runner = "local",
    cluster: p.Cluster = "",
    range: p.Range = "",
    shards: p.Shards = "",
    retry_failed: p.RetryFailed = False,
    full: p.Full = False,
    device: p.Device = "auto",
    share: Annotated[
        float, typer.Option(metavar="FRACTION", help="fraction of --rate that the estimate expects")
    ] = DEFAULT_SHARE,
    rate: Annotated[
        float | None, typer.Option(metavar="TFLOPS", help="speed of the device; default: measured")
    ] = None,
    price: p.Price = "",
    json: p.Json = False,
) -> None:
    """Build a mixed dataset, or continue building it.

    Example:
      semix build birds.yaml --out /data/birds-mixed
    """
    from semix.flows import build as building
    from semix.flows.build_steps import ShardSelection

    selection = ShardSelection(p.parse_numbers(shards), retry_failed, skip_failed)
    hourly_price = prices.Price.read(price)
    if check or time:
        settings = load_config(BuildConfig, config, overrides)
        facts = building.check(settings, out, share=share, rate=rate, device=device, time=time)
        shown_facts: dict[str, Any] = facts if json else {**readable(facts)}
        if hourly_price is not None:
            cost = prices.build_cost(facts, hourly_price)
            shown_facts["price"] = cost if json else prices.describe_build_cost(cost, hourly_price)
        emit_facts(shown_facts, as_json=json)
        return
    placement = SlotSettings(slots, runner, cluster, range, device)
    root = building.build(
        config, out, overrides=overrides, slots=placement, selection=selection, full=full
    )
    show_root(root, as_json=json, full=True, price=hourly_price)


def resume(
    url: p.Root,
    overrides: p.PathOverrides = [],  # noqa: B006
    slots: p.Slots = 0,
    skip_failed: p.SkipFailed = "",
    retry_failed: p.RetryFailed = False,
    shards: p.Shards = "",
    full: p.Full = False,
    runner: p.Runner = "local",
    cluster: p.Cluster = "",
    range: p.Range = "",
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """Build the missing and the damaged shards of a mixed dataset.

    Its settings stay; only paths of models and images may change.

    Example:
      semix resume /data/birds-mixed
    """
    from semix.flows import build as building
    from semix.flows.build_steps import ShardSelection

    selection = ShardSelection(p.parse_numbers(shards), retry_failed, skip_failed)
    placement = SlotSettings(slots, runner, cluster, range, device)
    root = building.resume(
        url, overrides=overrides, slots=placement, selection=selection, full=full
    )
    show_root(root, as_json=json, full=True)


def extend(
    root: Annotated[
        str, typer.Argument(metavar="WHERE", help="mixed dataset; with --out, a YAML file")
    ],
    groups_per_pair: Annotated[
        int, typer.Option(metavar="N", help="new number of series per pair", show_default=False)
    ] = 0,
    out: Annotated[
        str, typer.Option(metavar="ROOT", help="mixed dataset, where WHERE is a YAML file")
    ] = "",
    by_run: Annotated[
        str, typer.Option(metavar="RUN", help="more for pairs that this run's classifiers confuse")
    ] = "",
    series: Annotated[
        int, typer.Option(metavar="N", help="with --by-run: series to add", show_default=False)
    ] = 0,
    by: Annotated[
        PairWeighting,
        typer.Option(help="with --by-run: weight of a pair", rich_help_panel=p.MORE_PANEL),
    ] = "confusion",
    even: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="with --by-run: spread evenly over pairs",
            rich_help_panel=p.MORE_PANEL,
        ),
    ] = EVEN_SHARE,
    slots: p.Slots = 0,
    runner: p.Runner = "local",
    cluster: p.Cluster = "",
    range: p.Range = "",
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """Add series to a mixed dataset, and build them.

    Example:
      semix extend /data/birds-mixed --groups-per-pair 8
    """
    from semix.flows import build as building

    ways = [bool(out), bool(groups_per_pair), bool(by_run)]
    if ways.count(True) != 1 or bool(series) != bool(by_run):
        remedy = "give a root and --groups-per-pair, or a root, --by-run and --series, or a "
        raise InputError("extend", root, f"{remedy}config file and --out")
    placement = SlotSettings(slots, runner, cluster, range, device)
    if by_run:
        extended = building.extend_by_run(root, by_run, series, by=by, even=even, slots=placement)
    elif out:
        extended = building.extend_to(load_config(BuildConfig, root), out, slots=placement)
    else:
        extended = building.extend(Root(root), groups_per_pair, slots=placement)
    show_root(extended, as_json=json, full=True)


def relabel(
    url: p.Root,
    overrides: p.AnnotationOverrides = [],  # noqa: B006
    list_: Annotated[bool, typer.Option("--list", help="list the existing label sets")] = False,
    out: p.BakedOut = "",
    slots: p.Slots = 0,
    runner: p.Runner = "local",
    cluster: p.Cluster = "",
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """Label the same images under other settings, or continue that.

    Example:
      semix relabel /data/birds-mixed --set annotation.scale=2
    """
    from semix.flows import relabel as relabelling

    root = Root(url)
    if not list_:
        placement = SlotSettings(slots, runner, cluster, device=device)
        result = relabelling.relabel(root, overrides, slots=placement, out=out)
        if not json and "settings" in result:
            result["settings"] = relabelling.settings_in_words(result["settings"])
        emit_facts(result, as_json=json)
        return
    sets_facts = relabelling.list_label_sets(root)
    if json:
        emit_json(sets_facts)
        return
    for facts in sets_facts:
        emit(relabelling.describe_set(facts))
    if not sets_facts:
        emit("no label sets; make one with --set annotation.KEY=VALUE")


class ExportFormat(StrEnum):
    folder = "folder"
    parquet = "parquet"
    huggingface = "huggingface"
    croissant = "croissant"


class ExportImages(StrEnum):
    keep = "keep"
    png = "png"


def export(
    url: p.Root,
    to: Annotated[
        Path | None, typer.Option(metavar="PATH", help="folder to write; not for croissant")
    ] = None,
    format: Annotated[
        ExportFormat,
        typer.Option(
            metavar="FORMAT",
            help="folder: image files and a table; parquet: parquet files; huggingface: "
            "the same with a card, for the library `datasets`; croissant: only metadata, into ROOT",
        ),
    ] = ExportFormat.folder,
    image_format: Annotated[
        ExportImages, typer.Option(help="keep the stored files, or convert them to PNG")
    ] = ExportImages.keep,
    labels: p.Labels = "",
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="SCALE",
            help="sharpen the CLIP weights by this instead",
            rich_help_panel=p.MORE_PANEL,
        ),
    ] = None,
    index: p.Index = "",
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="CERT",
            help="PEM file of certificates and key, to sign each image (C2PA)",
            rich_help_panel=p.MORE_PANEL,
        ),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file: licence, creators, ... for croissant.json"),
    ] = None,
    repository: p.Repository = "",
    dry_run: p.DryRun = False,
    json: p.Json = False,
) -> None:
    """Write images and soft labels for other programs.

    Example:
      semix export /data/birds-mixed --to /data/birds-folder
    """
    from semix.flows.export import export as write

    facts = write(
        url,
        to,
        format=format.value,
        image_format=image_format.value,
        labels=labels or None,
        scale=scale,
        index=index or None,
        sign=sign,
        card=card,
        repository=repository,
        dry_run=dry_run,
    )
    if json:
        emit_json(facts)
        return
    missing, files = facts.pop("missing"), facts.pop("files", [])
    emit_facts(facts, as_json=False)
    if missing:
        emit(f"{CROISSANT} lacks {', '.join(missing)}; state them in a file for --card")
    for name in files:
        emit(f"{'would upload' if dry_run else 'uploaded'}: {name}")


class StandInSize(StrEnum):
    small = "small"
    medium = "medium"
    large = "large"


def standins(
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="image folder with CLASS/ folders, or YAML file")
    ],
    out: Annotated[Path, typer.Option(metavar="MODELS", help="folder for the models")],
    size: Annotated[
        StandInSize,
        typer.Option(help="minutes; an hour; or larger ones, for a GPU"),
    ] = StandInSize.small,
    overrides: p.RealOverrides = [],  # noqa: B006
    json: p.Json = False,
) -> None:
    """Train small models on your images, to try semix with them.

    Example:
      semix standins /data/birds --out models
    """
    from semix.flows.standins import standins as make

    result = make(where, out, size=size.value, overrides=overrides)
    if json:
        emit_json(result)
        return
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
    emit(f"trained: {times}" if times else "the models were trained already")
    emit(
        "share in which a classifier of real images sees the class, and Frechet distance of CLIP "
        "features to training images; in brackets that of as many real test images:"
    )
    for name, each in result["quality"].items():
        shares = f"{each['generated']:.0%} ({each['real']:.0%})"
        emit(f"  {name}: {shares}, {each['distance']:.3f} ({each['real_distance']:.3f})")
    shown, real = (
        fmean(each[side] for each in result["quality"].values()) for side in ("generated", "real")
    )
    emit(f"over all classes {shown:.0%} ({real:.0%}) are recognised")
    emit("small models that know these classes only: neither Stable Diffusion nor OpenAI's CLIP")
    emit(f"next: semix build {result['config']} --out ROOT")
