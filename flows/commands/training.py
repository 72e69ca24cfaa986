"""semix quickstart, train, evaluate, report."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Config, Json, Set
from flows.machines import Device, Machines
from flows.terminal import emit, emit_json


def quickstart(
    out: Annotated[Path, typer.Option(help="folder for everything")] = Path("quickstart"),
    seeds: Annotated[int, typer.Option(min=1, help="training runs a method")] = 5,
    json: Json = False,
) -> None:
    """The whole story on the bundled handwritten digits; ends with a report."""
    from flows.quickstart import main as run

    result = run(out, seeds=seeds)
    if json:
        emit_json(result)
        return
    from calib.report import print_table

    print_table(result["methods"])
    times = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in result["seconds"].items())
    emit(f"time went to: {times}")
    emit(f"report: {result['report']}")


def train(
    config: Config,
    out: Annotated[Path, typer.Option(help="run folder; machines that train together share it")],
    set_: Set = [],  # noqa: B006 - typer copies it
    resume: Annotated[bool, typer.Option("--resume", help="continue from checkpoints")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="processes over all machines, one a GPU")
    ] = 1,
    machines: Annotated[
        int, typer.Option(min=1, help="machines that train together; run this on each of them")
    ] = 1,
    machine_rank: Annotated[
        int, typer.Option(min=0, help="which of them this is; 0 is the main one")
    ] = 0,
    main_process: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="of the main machine, as 10.0.0.1:29500")
    ] = "",
    restarts: Annotated[
        int, typer.Option(min=0, help="start a trainer that was killed or crashed so often again")
    ] = 0,
    device: Annotated[Device, typer.Option(help="to train on")] = "auto",
    json: Json = False,
) -> None:
    """Train and evaluate one method, all its seeds, through accelerate."""
    from flows.train import train as run

    together = Machines(processes, machines, machine_rank, main_process, device)
    folder = run(config, out, overrides=set_, resume=resume, machines=together, restarts=restarts)
    if json:
        from data.files import read_json

        emit_json(read_json(folder / "evaluation.json"))
    else:
        emit(str(folder / "evaluation.json"))


def evaluate(
    run: Annotated[Path, typer.Argument(help="folder of a trained run", show_default=False)],
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="as evaluation.bins=20")
    ] = [],  # noqa: B006 - typer copies it
    device: Annotated[str, typer.Option(help="to run networks on: auto, cpu, cuda")] = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="run the networks even where logits are stored")
    ] = False,
    json: Json = False,
) -> None:
    """Measure a trained run anew: other bins, intervals, corrupted or foreign images."""
    from flows.evaluate import evaluate as measure

    evaluation = measure(run, overrides=set_, device=device, fresh=fresh)
    if json:
        emit_json(evaluation)
        return
    from calib.report import load_methods, print_evaluation

    print_evaluation(load_methods([run]))
    emit(str(run / "evaluation.json"))


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; the first is the baseline")],
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    mixed: Annotated[str, typer.Option(help="root; by default what the runs trained on")] = "",
    title: Annotated[str, typer.Option()] = "semix",
    json: Json = False,
) -> None:
    """Compare runs on one self-contained HTML page."""
    from flows.report import report as write

    write(runs, out, mixed=mixed, title=title, as_json=json)
