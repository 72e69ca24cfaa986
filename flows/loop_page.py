"""A loop's page: measures by round, beside as many series drawn evenly; and loop.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semix.calib.page import write_report
from semix.calib.replicates import compare
from semix.calib.results import MethodResult, load_methods
from semix.calib.shown_measures import ACCURACY, ECE, NLL
from semix.calib.tables import summary_table
from semix.data.files import write_json
from semix.data.root import Root, Round
from semix.flows.loop import CHOSEN, EVEN, LOOP_JSON, PAGE, LoopRun
from semix.flows.loop_config import LoopConfig

MEASURES = (ACCURACY, ECE, NLL)


def write_loop_page(settings: LoopConfig, runs: Sequence[LoopRun], out: Path) -> Path:
    """Write loop.html and loop.json; the last even round is the baseline on the page."""
    methods = [(run, load_methods([run.folder])[-1]) for run in runs]
    curves = {
        kind: [method for run, method in methods if run.round == 0 or run.kind == kind]
        for kind in (CHOSEN, EVEN)
    }
    last = max(run.round for run in runs)
    ordered = sorted(runs, key=lambda run: (run.round != last, run.kind != EVEN, run.round))
    root = Root(str(out / CHOSEN))
    planned = root.rounds()[: last + 1]  # an earlier command may have asked for more
    labels = {CHOSEN: f"by {settings.by}", EVEN: "even"}
    write_report(
        out / PAGE,
        runs=[run.folder for run in ordered],
        mixed=root.url,
        agreement=None,
        facts={"rounds": {str(n): each["by"] for n, each in enumerate(planned)}},
        title=settings.name,
        rounds={labels[kind]: curve for kind, curve in curves.items()},
    )
    write_json(out / LOOP_JSON, _record(planned, curves))
    return out / PAGE


def _record(
    rounds_planned: Sequence[Round], curves: dict[str, list[MethodResult]]
) -> dict[str, Any]:
    """Series and measures by round, and the change by choosing pairs with its interval."""
    rounds, series = [], 0
    for number, (planned, chosen, even) in enumerate(
        zip(rounds_planned, curves[CHOSEN], curves[EVEN], strict=True)
    ):
        series += planned["series"]
        changes = {}
        for measure in MEASURES if number else ():
            for kind in ("plain", "scaled"):
                test = compare(chosen.resamples(measure, kind), even.resamples(measure, kind))
                if test is not None:
                    changes[f"{measure.key} {kind}"] = [test.change, test.low, test.high]
        rounds.append({"series": series, "by": planned["by"], "change": changes})
    table = summary_table([*curves[CHOSEN], *curves[EVEN][1:]])
    return {"rounds": rounds, "methods": table}
