"""A loop's page: measures by round, beside as many series drawn evenly."""

from collections.abc import Sequence
from pathlib import Path

from semix.calib.page import write_report
from semix.calib.results import load_methods
from semix.data.root import Root
from semix.flows.loop import CHOSEN, EVEN, PAGE, LoopRun
from semix.flows.loop_config import LoopConfig


def write_loop_page(settings: LoopConfig, runs: Sequence[LoopRun], out: Path) -> None:
    """Write loop.html of one replicate; the last even round is the baseline on the page."""
    methods = [(run, load_methods([run.folder])[-1]) for run in runs]
    labels = {CHOSEN: f"by {settings.by}", EVEN: "even"}
    last = max(run.round for run in runs)
    ordered = sorted(runs, key=lambda run: (run.round != last, run.kind != EVEN, run.round))
    root = Root(str(out / CHOSEN))
    planned = root.rounds()[: last + 1]  # an earlier command may have asked for more
    write_report(
        out / PAGE,
        runs=[run.folder for run in ordered],
        mixed=root.url,
        agreement=None,
        facts={"rounds": {str(n): each["by"] for n, each in enumerate(planned)}},
        title=settings.name,
        rounds={
            label: [method for run, method in methods if run.round == 0 or run.kind == kind]
            for kind, label in labels.items()
        },
    )
