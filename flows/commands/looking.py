"""semix status, failures, verify, browse, show, audit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from semix.data.contact_sheet import contact_sheet, read_series, sample_series, shard_of
from semix.data.errors import InputError
from semix.data.exclusion import flags_of
from semix.data.formats import Failure
from semix.data.printable import noise_in_words, print_line, printable_line
from semix.data.root import Root
from semix.data.tar import GroupSample
from semix.data.verify import verify as verify_root
from semix.flows import parameters as p
from semix.flows.failures import translate_damage
from semix.flows.paths import output_file
from semix.flows.prices import Price
from semix.flows.progress import show_root
from semix.flows.terminal import emit, emit_json, print_error, say

if TYPE_CHECKING:
    from semix.pipeline.regeneration import SeriesComparison

IMAGE_FILE = typer.Option(metavar="FILE", help="image file to write, .png or .webp")
TRACEBACK_LINES = 5


def status(
    url: p.Root,
    full: Annotated[
        bool, typer.Option("--full", help="also read all commit records: speed, seconds by stage")
    ] = False,
    price: p.Price = "",
    json: p.Json = False,
) -> None:
    """Show how many shards are done, missing and failed.

    A price reads all commit records, as --full does.

    Example:
      semix status /data/birds-mixed --price "2.49 EUR"
    """
    show_root(Root(url), as_json=json, full=full, price=Price.read(price))


def failures(url: p.Root, json: p.Json = False) -> None:
    """Show why missing shards failed.

    Example:
      semix failures /data/birds-mixed
    """
    failed_shards = {
        shard: _failure_facts(attempts) for shard, attempts in Root(url).failures().items()
    }
    if json:
        emit_json(failed_shards)
        return
    for shard, facts in failed_shards.items():
        count, group = facts["attempts"], facts["group"]
        series = "" if group is None else f"group {group}, "
        times = "1 attempt" if count == 1 else f"{count} attempts"
        reason = printable_line(f"{facts['error']}: {facts['message']}")
        emit(f"shard {shard}: {reason} ({series}{times})")
    emit(
        f"{len(failed_shards)} shards; try them again with --retry-failed, or leave them out with "
        "--skip-failed LIMIT"
        if failed_shards
        else "no failures"
    )


def _failure_facts(attempts: list[Failure]) -> dict[str, Any]:
    """Facts about the last attempt at a shard, and the number of attempts."""
    last = attempts[-1]
    return {
        "attempts": len(attempts),
        "error": last.error,
        "message": last.message,
        "group": last.group,
        "time": last.time,
        "traceback": last.traceback[-TRACEBACK_LINES:],
    }


def verify(
    url: p.Root,
    full: Annotated[bool, typer.Option("--full", help="also check hashes, images, labels")] = False,
    regenerate: Annotated[
        int, typer.Option(min=0, metavar="N", help="also make N series again, and compare pixels")
    ] = 0,
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """Check that all files of a mixed dataset agree with its records.

    The exit status is 1 if something is damaged, or regenerated pixels differ. Other versions or
    devices than a series was made with may change pixels; they are named.

    Example:
      semix verify /data/birds-mixed --full --regenerate 3
    """
    root = Root(url)
    problems = []
    for problem in verify_root(root, full=full):
        problems.append(problem)
        if not json:
            emit(f"{'' if problem.damage else 'orphan: '}{printable_line(str(problem))}")
    damaged = sum(problem.damage for problem in problems)
    differing = _regenerated_differences(root, regenerate, device=device, quiet=json)
    if json:
        rows: list[tuple[int | None, str, str, bool]]
        rows = [(p.shard, p.kind, p.text, p.damage) for p in problems]
        rows += [(c.shard, "pixels", str(c), True) for c in differing]
        names = ("shard", "kind", "problem", "damage")
        emit_json([dict(zip(names, row, strict=True)) for row in rows])
    elif damaged:
        command = f"semix resume {root.url}{' --full' * full}"
        emit(f"{damaged} problems; `{command}` makes the damaged files again")
    else:
        orphans = f"; {len(problems)} orphans, see `semix gc {root.url}`" if problems else ""
        emit(f"{len(root.done())} shards as recorded{orphans}")
    raise typer.Exit(1 if damaged or differing else 0)


def _regenerated_differences(
    root: Root, count: int, *, device: str, quiet: bool
) -> list["SeriesComparison"]:
    """Make series again, print each comparison unless `quiet`, and return those that differ."""
    if not count:
        return []
    from semix.pipeline.regeneration import compare

    differing = []
    with translate_damage(root.url):
        for comparison in compare(root, count, device=device):
            if not quiet:
                emit(str(comparison))
            if not comparison.same:
                differing.append(comparison)
    return differing


def browse(
    url: p.Root,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="draw a contact sheet instead, .png or .webp"),
    ] = None,
    groups: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="series of the sheet, as in 3,7-9; default: some of each pair"
        ),
    ] = "",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="of the page; default: a free one")
    ] = 0,
) -> None:
    """Look at series and exclude some, on a page of this machine.

    It prints an address for a browser, and serves until Ctrl-C. Excluded series stay in the root;
    a training leaves them out with mixed.exclude.flagged=[excluded].

    Example:
      semix browse /data/birds-mixed
    """
    if out is None:
        if groups:
            raise InputError("--groups", groups, "is for a contact sheet; add --out FILE.png")
        from semix.flows.browse import browse as serve  # FastAPI costs a second

        serve(url, port=port, show=_show_address)
        return
    _check_image_file(out)
    root = Root(url)
    with translate_damage(root.url):
        numbers = sorted(p.parse_numbers(groups)) if groups else sample_series(root)
        sheet = contact_sheet(read_series(root, numbers))
    sheet.save(out)
    emit(str(out))


def _show_address(address: str) -> None:
    print_line(address)  # at once, also into a pipe
    say("open this address in a browser of this machine; Ctrl-C ends the page")


def show(
    url: p.Root,
    group: Annotated[int, typer.Argument(metavar="GROUP", help="number of the series")],
    out: Annotated[Path | None, IMAGE_FILE] = None,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="make again, compare")] = False,
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """Show what is recorded of one series, and draw it.

    Example:
      semix show /data/birds-mixed 40 --out series-40.png
    """
    if out:
        _check_image_file(out)
    root = Root(url)
    shard = shard_of(root, group)
    record = root.record(shard)
    facts: dict[str, Any] = {"group": group, "shard": shard, "tar": record and record.tar}
    with translate_damage(root.url):
        facts["flags"] = flags_of(root, group)
    sample = _stored_series(root, group) if record else None
    if regenerate:
        sample, facts["same_pixels"] = _regenerated_series(root, group, sample, device=device)
    if sample is not None:
        facts |= sample.record.model_dump(mode="json", exclude_unset=True)
        if out:
            with translate_damage(root.url):
                sheet = contact_sheet([sample])
            sheet.save(out)
            facts["picture"] = str(out)
    if json:
        emit_json(facts)
    else:
        emit("\n".join(_series_lines(facts, url=root.url)))


def _stored_series(root: Root, group: int) -> GroupSample:
    with translate_damage(root.url):
        return read_series(root, [group])[0]


def _check_image_file(out: Path) -> None:
    """Raise InputError before drawing if the image file cannot be written."""
    output_file("--out", out)
    if out.suffix.lower() not in (".png", ".webp") or out.is_dir():
        raise InputError("--out", out, "name a file that ends in .png or .webp")
    if not out.parent.is_dir():
        remedy = f"there is no folder {out.parent}; make it first, or name a file in another"
        raise InputError("--out", out, remedy)


def _regenerated_series(
    root: Root, group: int, stored: GroupSample | None, *, device: str
) -> tuple[GroupSample, bool | None]:
    """The series, generated again, and whether its pixels equal the stored ones, if any."""
    from semix.pipeline.regeneration import regenerate, same_pixels

    regenerated = regenerate(root, group, device=device)
    return regenerated, None if stored is None else same_pixels(regenerated, stored)


def _series_lines(facts: dict[str, Any], *, url: str) -> list[str]:
    shard = facts["shard"]
    tar = facts["tar"] or f"not made yet; semix resume {url} --shards {shard}"
    lines = [f"group {facts['group']}, shard {shard}: {tar}"]
    if facts["flags"]:
        lines.append(f"flags    {printable_line(', '.join(facts['flags']))}")
    if "names" in facts:
        names = ", ".join(
            f"{printable_line(n)} ({k})"
            for n, k in zip(facts["names"], facts["classes"], strict=True)
        )
        lines += [f"classes  {names}", f"seed     {facts['seed']}"]
        lines.append(f"noise    {printable_line(noise_in_words(facts['noise']))}")
        lines.append("alpha  weight  label")
        rows = zip(facts["alphas"], facts["weights"], facts["labels"], strict=True)
        for alpha, weight, label in rows:
            probabilities = ", ".join(f"{target}: {value:.3f}" for target, value in label)
            lines.append(f"{alpha:5.3f}  {weight:6.3f}  {probabilities}")
    if "same_pixels" in facts:
        verdict = {True: "equal", False: "differ from", None: "cannot be compared with"}
        lines.append(f"regenerated pixels {verdict[facts['same_pixels']]} the stored ones")
    if "picture" in facts:
        lines.append(f"picture  {facts['picture']}")
    return lines


def audit(
    url: p.Root,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="folder to write; default: audit-NAME, after ROOT"),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="run folder whose classifiers judge unmixed images"),
    ] = None,
    concept: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="flag series near this text by CLIP; may be repeated"),
    ] = [],  # noqa: B006 - typer copies it
    concepts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="more such texts, one per line", rich_help_panel=p.MORE_PANEL
        ),
    ] = None,
    concept_above: Annotated[
        float | None,
        typer.Option(
            metavar="COSINE",
            help="flag images above it; default: nearer to a concept than to their classes",
            rich_help_panel=p.MORE_PANEL,
        ),
    ] = None,
    labels: p.Labels = "",
    index: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="index, as in index/3.json; default: the newest",
            rich_help_panel=p.MORE_PANEL,
        ),
    ] = "",
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="where CLIP is, as in annotation.model=PATH; repeatable",
            rich_help_panel=p.MORE_PANEL,
        ),
    ] = [],  # noqa: B006 - typer copies it
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="device of the networks", rich_help_panel=p.MORE_PANEL),
    ] = "auto",
    json: p.Json = False,
) -> None:
    """Measure whether labels fit images; flag series; write a page.

    The exit status is 1 only if shards cannot be read.

    Example:
      semix audit /data/birds-mixed --out audit
    """
    root = Root(url)  # refuses a bad root before torch is loaded
    from semix.flows import audit as auditing
    from semix.pipeline.audit.concepts import read_concepts

    results = auditing.audit(
        root,
        labels=labels or None,
        index=index or None,
        judge=judge,
        concepts=[*concept, *(read_concepts(concepts) if concepts else [])],
        concept_above=concept_above,
        overrides=overrides,
        out=out,
        device=device,
    )
    if json:
        emit_json(results)
    else:
        auditing.print_checks(results["checks"])
        emit(f"page: {results['page']}")
        emit(f"numbers: {results['json']}")
        emit(f"flags: {results['flags_file'] or 'not stored'}")
    for problem in results["unreadable"].values():
        print_error(problem)
    raise typer.Exit(1 if results["unreadable"] else 0)
