"""semix train, evaluate, study, loop, report."""

from pathlib import Path
from typing import Annotated

import typer

from semix.calib.run_folder import EVALUATION
from semix.data.errors import InputError
from semix.flows import parameters as p
from semix.flows.launcher import Machines
from semix.flows.terminal import emit, emit_json, say


def train(
    config: p.Config,
    out: p.RunFolder,
    overrides: p.TrainOverrides = [],  # noqa: B006 - typer copies it
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,  # it always resumes
    processes: p.Processes = 1,
    restarts: p.Restarts = 0,
    device: p.Device = "auto",
    machines: p.Machines = 1,
    machine_rank: p.MachineRank = 0,
    main_process: p.MainProcess = "",
    json: p.Json = False,
) -> None:
    """Train and evaluate all seeds of one method, or continue.

    Example:
      semix train csm.yaml --out runs/csm
    """
    from semix.flows.train import train as run

    launch_machines = Machines(processes, machines, machine_rank, main_process, device)
    run_folder = run(config, out, overrides=overrides, machines=launch_machines, restarts=restarts)
    hint = (
        f"to use it: semix predict {run_folder} PICTURES, or semix export-classifier {run_folder}"
    )
    _show_evaluation(run_folder, run_folder / EVALUATION, as_json=json, hint=hint)


def evaluate(
    run: p.TrainedRun,
    overrides: p.EvaluationOverrides = [],  # noqa: B006
    to: p.EvaluationFile = "",
    device: p.Device = "auto",
    fresh: p.Fresh = False,
    export: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="calarena: also files for its run_benchmark.py"),
    ] = "",
    json: p.Json = False,
) -> None:
    """Evaluate a trained run again, under other settings.

    With other settings, the results go beside the run's evaluation.json, which stays.

    Example:
      semix evaluate runs/csm --set evaluation.bins=20
    """
    from semix.flows.evaluate import export_results, run_evaluation

    if export not in ("", "calarena"):
        raise InputError("--export", export, "the only format is calarena")
    path = run_evaluation(run, overrides=overrides, to=to, device=device, fresh=fresh)
    files = export_results(Path(run), export)
    _show_evaluation(Path(run), path, as_json=json)
    if not json:
        for path in files:
            emit(f"written: {path}")


def _show_evaluation(run: Path, path: Path, *, as_json: bool, hint: str = "") -> None:
    """Print the tables of an evaluation, its path, what comes next, and its warnings."""
    from semix.calib.results import load_evaluation, methods_of
    from semix.calib.tables import details, print_table

    evaluation = load_evaluation(run, path)
    if as_json:
        emit_json(evaluation)
    else:
        for table in details(methods_of(run, evaluation)):
            print_table(table)
        emit(str(path))
    if hint:
        say(hint)
    for warning in evaluation.get("warnings", ()):
        say(f"warning: {warning}")


def study(
    config: p.Config,
    out: p.StudyFolder,
    overrides: p.StudyOverrides = [],  # noqa: B006
    slots: p.Trainers = 0,
    only: p.Cells = [],  # noqa: B006
    restarts: p.Restarts = 0,
    json: p.Json = False,
) -> None:
    """Train and compare methods on datasets, or continue.

    Mixed datasets that the config lists under `builds` are built first.

    Example:
      semix study configs/study-quickstart.yaml --out digits
    """
    from semix.flows.study import study as run

    record = run(
        config, out, overrides=overrides, slots=slots or None, only=only, restarts=restarts
    )
    if json:
        emit_json(record)
        return
    page = Path(out, "study.md")
    emit(page.read_text().rstrip())
    emit(f"written: {page}, study-validation.md, .csv, .tex, .json, values.csv, figures/")


def loop(
    config: p.Config,
    out: p.LoopFolder,
    rounds: p.Rounds = 2,
    overrides: p.LoopOverrides = [],  # noqa: B006
    slots: p.Slots = 0,
    json: p.Json = False,
) -> None:
    """Train, add series where classifiers err, and train again.

    Beside it as many series are added evenly; the page compares both.

    Example:
      semix loop configs/loop-digits.yaml --out loop
    """
    from semix.flows.loop import LOOP_MD, PAGE
    from semix.flows.loop import loop as run

    record = run(config, out, rounds=rounds, overrides=overrides, slots=slots or None)
    if json:
        emit_json(record)
        return
    tables = Path(out, LOOP_MD)
    emit(tables.read_text().rstrip())
    emit(f"written: {tables}, loop.json, values.csv, and {PAGE} beside the rounds")


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="run folders; the first is the baseline")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="page to write")] = (
        Path("report.html")
    ),
    mixed: Annotated[
        str, typer.Option(metavar="ROOT", help="mixed dataset to show; default: that of the runs")
    ] = "",
    title: Annotated[str, typer.Option(metavar="TEXT", help="title of the page")] = "semix",
    json: p.Json = False,
) -> None:
    """Compare runs on one self-contained HTML page.

    Example:
      semix report runs/ce runs/csm --out report.html
    """
    from semix.flows.report import print_report

    print_report(runs, out, mixed=mixed, title=title, as_json=json)
