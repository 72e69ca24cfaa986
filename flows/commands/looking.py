"""semix status, failures, verify, browse, show, audit."""

from pathlib import Path
from typing import Annotated, Any

import typer
from semix.data.contact_sheet import contact_sheet, read_series, shard_of, some_of_all_pairs
from semix.data.errors import InputError
from semix.data.formats import Failure
from semix.data.printable import printable_line
from semix.data.root import Root
from semix.data.tar import GroupSample
from semix.data.verify import verify as verified
from semix.flows import parameters as p
from semix.flows.failures import damage_named
from semix.flows.paths import own_file
from semix.flows.prices import Price
from semix.flows.progress import show_root
from semix.flows.terminal import emit, emit_json, say_error

PICTURE = typer.Option(metavar="FILE", help="a picture to write, PNG or WebP")
TRACEBACK_LINES = 5


def status(url: p.Root, price: p.Price = "", json: p.Json = False) -> None:
    """What is done, missing and failed, from the store alone.

    Example:
      semix status /data/birds-mixed --price "2.49 EUR"
    """
    show_root(Root(url), as_json=json, price=Price.read(price))


def failures(url: p.Root, json: p.Json = False) -> None:
    """Why shards that are still missing failed.

    Example:
      semix failures /data/birds-mixed
    """
    found = {shard: _explained(attempts) for shard, attempts in Root(url).failures().items()}
    if json:
        emit_json(found)
        return
    for shard, facts in found.items():
        count, group = facts["attempts"], facts["group"]
        where = "" if group is None else f"group {group}, "
        times = "1 attempt" if count == 1 else f"{count} attempts"
        reason = printable_line(f"{facts['error']}: {facts['message']}")
        emit(f"shard {shard}: {reason} ({where}{times})")
    emit(
        f"{len(found)} shards; try them again with --retry-failed, or leave them out with "
        "--skip-failed LIMIT"
        if found
        else "no failures"
    )


def _explained(attempts: list[Failure]) -> dict[str, Any]:
    """The last attempt, and how many there were."""
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
    full: Annotated[bool, typer.Option("--full", help="also every hash, image and label")] = False,
    json: p.Json = False,
) -> None:
    """Compare a mixed dataset with its records.

    Exit status 1 if something is damaged.

    Example:
      semix verify /data/birds-mixed --full
    """
    root = Root(url)
    found = []
    for problem in verified(root, full=full):
        found.append(problem)
        if not json:
            emit(f"{'' if problem.damage else 'orphan: '}{printable_line(str(problem))}")
    damaged = sum(problem.damage for problem in found)
    if json:
        emit_json(
            [
                {"shard": p.shard, "kind": p.kind, "problem": p.text, "damage": p.damage}
                for p in found
            ]
        )
    elif damaged:
        again = f"semix resume {root.url}{' --full' * full}"
        emit(f"{damaged} problems; `{again}` makes what is damaged again")
    else:
        orphans = f"; {len(found)} orphans, see `semix gc {root.url}`" if found else ""
        emit(f"{len(root.done())} shards as recorded{orphans}")
    raise typer.Exit(1 if damaged else 0)


def browse(
    url: p.Root,
    out: Annotated[Path, PICTURE] = Path("series.png"),
    groups: Annotated[
        str, typer.Option(metavar="LIST", help="series, as in 3,7-9; default: some of all pairs")
    ] = "",
) -> None:
    """A contact sheet of series with alpha, CLIP weight, soft label.

    Example:
      semix browse /data/birds-mixed --groups 3,7-9
    """
    _check_picture(out)
    root = Root(url)
    wanted = sorted(p.chosen(groups)) if groups else some_of_all_pairs(root)
    with damage_named(root.url):
        sheet = contact_sheet(read_series(root, wanted))
    sheet.save(out)
    emit(str(out))


def show(
    url: p.Root,
    group: Annotated[int, typer.Argument(metavar="GROUP", help="number of the series")],
    out: Annotated[Path | None, PICTURE] = None,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="make it anew, compare")] = False,
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """One series by its number: what is recorded of it, its picture.

    Example:
      semix show /data/birds-mixed 40 --out series-40.png
    """
    if out:
        _check_picture(out)
    root = Root(url)
    shard = shard_of(root, group)
    record = root.record(shard)
    facts: dict[str, Any] = {"group": group, "shard": shard, "tar": record and record.tar}
    sample = _stored(root, group) if record else None
    if regenerate:
        sample, facts["same_pixels"] = _made_anew(root, group, sample, device=device)
    if sample is not None:
        facts |= sample.record.model_dump(mode="json", exclude_unset=True)
        if out:
            with damage_named(root.url):
                sheet = contact_sheet([sample])
            sheet.save(out)
            facts["picture"] = str(out)
    if json:
        emit_json(facts)
    else:
        emit("\n".join(_readable(facts, url=root.url)))


def _stored(root: Root, group: int) -> GroupSample:
    with damage_named(root.url):
        return read_series(root, [group])[0]


def _check_picture(out: Path) -> None:
    """Raises InputError for a picture that could not be written, before one is drawn."""
    own_file("--out", out)
    if out.suffix.lower() not in (".png", ".webp") or out.is_dir():
        raise InputError("--out", out, "name a file that ends in .png or .webp")
    if not out.parent.is_dir():
        remedy = f"there is no folder {out.parent}; make it first, or name a file in another"
        raise InputError("--out", out, remedy)


def _made_anew(
    root: Root, group: int, stored: GroupSample | None, *, device: str
) -> tuple[GroupSample, bool | None]:
    """The series made now, and whether it looks as the stored one; None without one."""
    from semix.pipeline.shard import regenerate, same_pixels

    made = regenerate(root, group, device=device)
    return made, None if stored is None else same_pixels(made, stored)


def _readable(facts: dict[str, Any], *, url: str) -> list[str]:
    shard = facts["shard"]
    place = facts["tar"] or f"not made yet; semix resume {url} --shards {shard}"
    lines = [f"group {facts['group']}, shard {shard}: {place}"]
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
            shown = ", ".join(f"{target}: {share:.3f}" for target, share in label)
            lines.append(f"{alpha:5.3f}  {weight:6.3f}  {shown}")
    if "same_pixels" in facts:
        verdict = {True: "equal", False: "differ from", None: "cannot be compared with"}
        lines.append(f"pixels made anew {verdict[facts['same_pixels']]} the stored ones")
    if "picture" in facts:
        lines.append(f"picture  {facts['picture']}")
    return lines


def noise_in_words(facts: dict[str, Any]) -> str:
    """`select, stability 0.812, scores (0.812, 0.64)`: how it was chosen, then what is known."""
    others = (item for item in facts.items() if item[0] != "strategy")
    known = {key: value for key, value in others if value is not None}
    parts = [f"{key.replace('_', ' ')} {_in_words(value)}" for key, value in known.items()]
    return ", ".join([str(facts.get("strategy", "unknown")), *parts])


def _in_words(value: Any) -> str:
    """Numbers to three digits, lists in brackets, and nothing that is not known."""
    if isinstance(value, list):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_in_words(each)}' for key, each in value.items())})"
    return (
        f"{value:.3g}" if isinstance(value, float) else "unknown" if value is None else str(value)
    )


def audit(
    url: p.Root,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="of the page; default: audit-NAME of the root"),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="run folder; its classifiers judge the end points"),
    ] = None,
    labels: p.Labels = "",
    index: p.Index = "",
    device: p.Device = "auto",
    json: p.Json = False,
) -> None:
    """Do the labels fit the images? Measures, flags, writes a page.

    Exit status 1 only if shards cannot be read.

    Example:
      semix audit /data/birds-mixed --out audit
    """
    root = Root(url)  # or why not, before torch is loaded
    from semix.flows import audit as auditing

    found = auditing.audit(
        root, labels=labels or None, index=index or None, judge=judge, out=out, device=device
    )
    if json:
        emit_json(found)
    else:
        auditing.print_checks(found["checks"])
        emit(f"page: {found['page']}")
        emit(f"numbers: {found['json']}")
        emit(f"flags: {found['flags_file'] or 'not stored'}")
    for problem in found["unreadable"].values():
        say_error(problem)
    raise typer.Exit(1 if found["unreadable"] else 0)
