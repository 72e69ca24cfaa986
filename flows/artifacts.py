"""Artifacts in Prefect's pages: progress, tables, images, links. Their errors never fail a run."""

import base64
import io
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image
from prefect import runtime
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from semix.calib.config import TrainConfig
from semix.calib.results import MethodResult
from semix.calib.run_folder import HISTORY, seed_evaluation_path, seed_folder
from semix.data.contact_sheet import (
    NEARLY_HARD_BELOW,
    contact_sheet,
    read_series,
    relative_entropy,
    sample_series,
)
from semix.data.files import MAX_JSON, read_bytes
from semix.data.fingerprint import fingerprint
from semix.data.lineage import describe_source, made_and_reused, source
from semix.data.pace import Throttle, duration
from semix.data.printable import markdown_text
from semix.data.root import RecordTotals, Root, RootProgress
from semix.flows.progress import Rate, derived_metrics, describe, image_count, images_left

ARTIFACT_EVERY_S = 5.0
STAGES = {
    "noise": "noise selected",
    "generate": "images generated",
    "encode": "images encoded",
    "annotate": "labels by CLIP",
    "write": "shards written",
    "stall": "waited for the store",
}
MAX_FAILURES = 20  # rows; `semix failures` shows all
ROWS = 4  # series on a contact sheet
MAX_READ = 64_000_000  # bytes of the shards that a contact sheet reads
MAX_SIDE = 1600  # pixels
MAX_TEXT = 140_000  # characters of an image as text, in Prefect's database

log = logging.getLogger("semix.prefect")
build_log = logging.getLogger("semix.build")

_warned: set[str] = set()  # flow runs that logged a warning about their display


def artifact_key(kind: str, url: str, *identity: str) -> str:
    """The key of an artifact: `semix-build-mixed-1a2b3c4d`.

    Prefect shows the newest artifact of a key; it accepts lower-case letters, digits and dashes.

    Args:
        url: the shown root or folder; its last part is the name.
        identity: further identity, as a plan's digest.
    """
    name = re.sub("[^a-z0-9]+", "-", PurePosixPath(url).name.lower()).strip("-")[:40].strip("-")
    return "-".join(filter(None, ("semix", kind, name, fingerprint([url, *identity])[:8])))


@contextmanager
def best_effort_display() -> Iterator[None]:
    """Turn an error in the block, which shows something in Prefect, into one warning per run.

    Requests are not retried: waiting for a server that restarts would delay the loop that watches
    the slots.
    """
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            yield
    except Exception as error:
        run = str(runtime.flow_run.id)
        if run not in _warned:
            _warned.add(run)
            reason = str(error) or type(error).__name__
            log.warning("Prefect does not show all of this run: %s", reason)


@contextmanager
def growing_artifact(key: str) -> Iterator[Callable[[float, str], None]]:
    """Yields `publish(fraction, description)`, which updates an artifact every few seconds."""
    artifact: Any = None
    with best_effort_display():
        artifact = create_progress_artifact(0.0, key=key, description="begins")
    latest, pause = None, Throttle(ARTIFACT_EVERY_S, at_once=True)

    def send(fraction: float, description: str) -> None:
        if artifact is not None:
            with best_effort_display():
                update_progress_artifact(artifact, 100 * fraction, description)

    def publish(fraction: float, description: str) -> None:
        nonlocal latest
        latest = (fraction, description)
        if pause.is_due():
            send(*latest)
            pause.restart()  # after a send that may have waited

    yield publish  # no `finally`: after an interrupt, nothing may delay the end
    if latest is not None:
        send(*latest)


@contextmanager
def progress_artifact(key: str) -> Iterator[Callable[[RootProgress], None]]:
    """Yields a function that shows how many images are done."""
    rate = Rate()
    with growing_artifact(key) as publish:

        def show(progress: RootProgress) -> None:
            rate.update(progress.images_done, time.monotonic())
            parts = filter(None, (image_count(progress), describe(progress, rate.value)))
            total = progress.images_done + images_left(progress)
            publish(progress.images_done / max(1, total), ", ".join(parts))

        yield show


@contextmanager
def training_artifact(
    settings: TrainConfig, run: Path, *, key: str
) -> Iterator[Callable[[], None]]:
    """Yields a function that reads the run folder and shows how many epochs are done."""
    with growing_artifact(key) as publish:

        def show() -> None:
            with best_effort_display():
                publish(*training_progress(settings, run))

        yield show


def training_progress(settings: TrainConfig, run: Path) -> tuple[float, str]:
    """The completed fraction of all epochs, and a description, from the histories of the seeds.

    A measured seed counts in full, even if it ended early.
    """
    epochs = settings.epochs + (settings.head.epochs if settings.head else 0)
    measured = [seed for seed in settings.seeds if seed_evaluation_path(run, seed).is_file()]
    trained = {seed: _epochs(seed_folder(run, seed) / HISTORY) for seed in settings.seeds}
    done = sum(epochs if seed in measured else trained[seed] for seed in settings.seeds)
    text = f"{len(measured)} of {len(settings.seeds)} seeds measured"
    unfinished = [seed for seed in settings.seeds if seed not in measured and trained[seed]]
    text += "".join(f", seed {seed}: epoch {trained[seed]} of {epochs}" for seed in unfinished)
    return min(1.0, done / (epochs * len(settings.seeds))), text


def _epochs(history: Path) -> int:
    return len(read_bytes(history, max_bytes=MAX_JSON).splitlines()) if history.is_file() else 0


def facts_table(facts: Mapping[str, Any], *, key: str, description: str) -> None:
    """Show facts by name, one per row; empty ones are left out.

    Prefect's pages render the cells and the description as Markdown.

    Args:
        facts: names and plain values, which are escaped.
        description: Markdown.
    """
    with best_effort_display():
        rows = [
            {
                "what": markdown_text(name.replace("_", " ")),
                "value": markdown_text(str(value)),
            }
            for name, value in facts.items()
            if value not in (None, "")
        ]
        create_table_artifact(rows, key=f"{key}-summary", description=description)


def build_summary(
    root: Root, *, key: str, began: RootProgress, before: Sequence[int], seconds: float
) -> None:
    """Show counts, speed, lineage and failures after a run, in one table.

    Args:
        began, before: the progress and the committed shards when the run began.
        seconds: duration of the run.
    """
    with best_effort_display():
        facts = summary(root.progress(), root.totals(), began=began, seconds=seconds)
        shards_made = made_and_reused(before, root.done())
        facts |= {"made in this run": shards_made["made"], "reused": shards_made["reused"]}
        if series := _series_to_show(root):
            entropy_ratio = relative_entropy(read_series(root, series))
            facts["entropy of labels"] = f"{entropy_ratio:.2f} of equal labels'"
            if entropy_ratio < NEARLY_HARD_BELOW:
                text = "%s: labels are nearly hard (%.2f of the entropy of equal labels), which "
                text += "costs accuracy; soften them: semix relabel %s --set annotation.scale=2.3"
                build_log.warning(text, root.url, entropy_ratio, root.url)
        facts |= {"lineage": describe_source(source(root.plan)), **_failures(root)}
        address = markdown_text(root.url)
        text = f"What is at {address}; the rate of one worker leaves out loading models."
        facts_table(facts, key=key, description=text)


def summary(
    progress: RootProgress, totals: RecordTotals, *, began: RootProgress, seconds: float
) -> dict[str, str]:
    """Counts, rates and seconds per stage."""
    new_shards = progress.done - began.done
    new_images = progress.images_done - began.images_done
    rate = derived_metrics(progress, totals)["images_per_second"]
    facts = {
        "shards": f"{progress.done:,} of {progress.shards:,}, {new_shards:,} in this run",
        "images": f"{progress.images_done:,} of {progress.images:,}, {new_images:,} in this run",
        "this run": f"{duration(seconds)}, {new_images / seconds:.3g} images/s",
        "one worker": f"{rate:.3g} images/s" if rate else "",
    }
    if totals.left_out:
        facts["left out"] = f"{totals.left_out} series"
    stages = sorted(totals.stages.items(), key=lambda stage: -stage[1])
    return facts | {STAGES[name]: f"{spent:.1f} s of all workers" for name, spent in stages}


def _failures(root: Root) -> dict[str, str]:
    """The last reason of each shard that failed."""
    failures = root.failures()
    facts = {
        f"shard {shard} failed": f"{attempts[-1].error}: {attempts[-1].message}"
        for shard, attempts in islice(failures.items(), MAX_FAILURES)
    }
    if num_hidden := len(failures) - len(facts):
        facts[f"{num_hidden} more failed"] = f"semix failures {root.url}"
    return facts


def series_sheet(root: Root, *, key: str) -> None:
    """Show one series from each of some shards, if there are any, as a contact sheet.

    It is an image in Markdown: an image artifact would also print its URL, which here holds the
    whole image as text.
    """
    with best_effort_display():
        series = _series_to_show(root)
        if not series:
            return
        data_url = as_text(contact_sheet(read_series(root, series)))
        text = (
            f"![series {', '.join(map(str, series))}]({data_url})\n\n"
            "Each row is a series; below each image are its alpha, its CLIP weight and its soft "
            f"label as a bar. All of them: semix browse {markdown_text(root.url)}"
        )
        create_markdown_artifact(text, key=f"{key}-series", description="a few of the series")


def as_text(sheet: Image.Image) -> str:
    """An image as a data URL of at most MAX_TEXT characters, scaled down if necessary."""
    sheet = sheet.copy()
    sheet.thumbnail((MAX_SIDE, MAX_SIDE))
    while True:
        file = io.BytesIO()
        sheet.save(file, "WEBP", quality=80)
        text = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
        if len(text) <= MAX_TEXT:
            return text
        sheet.thumbnail((sheet.width * 7 // 10, sheet.height))


def _series_to_show(root: Root) -> list[int]:
    """Series of different class pairs, as many as MAX_READ allows."""
    series: list[int] = []
    bytes_read = 0
    for number in sample_series(root, ROWS) if root.done() else []:
        record = root.record(root.layout.shard_of(number))
        if record is None:  # discarded since
            continue
        bytes_read += record.bytes
        if series and bytes_read > MAX_READ:
            break
        series.append(number)
    return series


def result_table(methods: Sequence[MethodResult], *, key: str) -> None:
    """Show the results of measured runs."""
    with best_effort_display():
        from semix.calib.tables import as_markdown, overview  # pandas, which only the end needs

        table = overview(methods)
        text = f"{as_markdown(table)}\n\n{markdown_text(table.note)}"
        create_markdown_artifact(text, key=f"{key}-results", description="on test images")


def markdown_file(page: Path, *, key: str) -> None:
    """Show a Markdown file without its figures, which are files beside it."""
    with best_effort_display():
        lines = [line for line in page.read_text().splitlines() if not line.startswith("![](")]
        text = "\n".join([*lines, "", _on_this_machine(f"With figures: {page}")])
        create_markdown_artifact(text, key=f"{key}-results", description="tables")


def link_to(page: Path, *, key: str) -> None:
    """Link to a page on the machine of the flow."""
    with best_effort_display():
        text = f"{_on_this_machine(page)}; browsers open it there only"
        link = page.absolute().as_uri()
        create_link_artifact(link, page.name, key=f"{key}-page", description=text)


def _on_this_machine(location: object) -> str:
    return markdown_text(f"{location} on {socket.gethostname()}")
