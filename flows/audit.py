"""Audit a mixed dataset: write a page, audit.json and flags in the root; print a table."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from semix.calib.judge import Judge
from semix.data.device import resolve_device
from semix.data.exclusion import store_flags
from semix.data.files import write_atomically
from semix.data.pace import Throttle
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.store import Store
from semix.flows.failures import RunFailed, translate_damage
from semix.flows.terminal import print_findings
from semix.pipeline.audit import Audit, as_json
from semix.pipeline.audit import audit as measure
from semix.pipeline.audit.concepts import Concepts, check_concepts, encode_concepts
from semix.pipeline.audit.page import write_page
from semix.pipeline.audit.read import Unreadable

LINE_EVERY_S = 15.0

log = logging.getLogger("semix.audit")


def audit(
    root: Root | str,
    *,
    index: str | None = None,
    labels: str | None = None,
    judge: Path | None = None,
    concepts: Sequence[str] = (),
    concept_above: float | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Audit a root into the folder `out`; by default `audit-NAME`, after the root.

    Args:
        concepts: texts; series with an image near one of them get the flag `concept`.
        concept_above: the cosine to a concept that flags an image; by default one that is nearer
            to a concept than to the texts of the classes of its series.
        overrides: where the CLIP model of the concepts lies, as `annotation.model=...`.
        device: device of the judge, and of CLIP's text tower.
    Returns:
        The content of audit.json, and the paths "page", "json" and "flags_file".
    Raises:
        InputError: no such root, index, label set or judge; a folder that cannot be written; a
            concept, limit or CLIP model that cannot be used.
        RunFailed: no shard can be read, or the prototypes are damaged.
    """
    check_concepts(concepts, concept_above)
    root = Root(root) if isinstance(root, str) else root
    folder = (out or Path(f"audit-{root.url.rstrip('/').rpartition('/')[2]}")).absolute()
    Store(str(folder)).check_writable()
    with translate_damage(root.url):
        source = PinnedRoot(root, index=index, labels=labels)
        encoded = (
            encode_concepts(
                source,
                concepts,
                above=concept_above,
                device=resolve_device(device),
                overrides=overrides,
            )
            if concepts
            else None
        )
        result = _audit_root(source, run=judge, device=device, concepts=encoded)
    page, json_file = folder / "audit.html", folder / "audit.json"
    write_page(page, result, title=f"Audit of {root.url.rpartition('/')[2]}")
    write_atomically(json_file, as_json(result.values))
    paths = {"page": str(page), "json": str(json_file), "flags_file": _store_flags(result)}
    return {**result.values, **paths}


def _audit_root(
    pinned_root: PinnedRoot, *, run: Path | None, device: str, concepts: Concepts | None
) -> Audit:
    log_progress = _progress_logger(sum(shard.groups for shard in pinned_root.shards))
    try:
        if run is None:
            return measure(pinned_root, concepts=concepts, heartbeat=log_progress)
        judge = Judge(run, device=device)
        judge.require_same_classes(pinned_root.class_names)
        return measure(
            pinned_root,
            judge=lambda images: judge.classes(torch.from_numpy(images)).numpy(),
            judge_name=judge.name,
            concepts=concepts,
            heartbeat=log_progress,
        )
    except Unreadable as error:
        raise RunFailed(f"{error}; `semix verify {pinned_root.root.url}` shows details") from None


def _store_flags(result: Audit) -> str | None:
    """Store the flags in the root, for its readers; None if the root cannot be written."""
    try:
        return store_flags(result.source.root, result.flags)
    except OSError as error:
        reason = error.strerror or error
        log.warning("flags are not stored, so readers cannot exclude by them: %s", reason)
        return None


def _progress_logger(total: int) -> Callable[[int], None]:
    """A function that is called with the number of newly read series, and logs progress."""
    done, throttle = 0, Throttle(LINE_EVERY_S)

    def report(groups: int) -> None:
        nonlocal done
        done += groups
        if throttle.is_due():
            throttle.restart()
            log.info("audit: %s of %s series", f"{done:,}", f"{total:,}")

    return report


def print_checks(checks: list[dict[str, Any]]) -> None:
    """Print each check with its value, `ok` or `look`, and advice."""
    rows = [
        (check["name"], "ok", check["figure"], "")
        if check["ok"]
        else (check["name"], "look", check["figure"], check["advice"])
        for check in checks
    ]
    print_findings(rows, {"ok": "green", "look": "bold yellow"})
