"""semix quickstart, standins, train, evaluate, report."""

import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.help_pages import MORE
from flows.commands.options import Config, Json, setting
from flows.launcher import Device, Machines
from flows.terminal import emit, emit_json


def quickstart(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="for everything")] = (
        Path("quickstart")
    ),
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="training runs a method")] = 3,
    json: Json = False,
) -> None:
    """The whole story on handwritten digits; ends with a report.

    Example:
      semix quickstart --seeds 5
    """
    from flows.quickstart import main as run

    result = run(out, seeds=seeds)
    if json:
        emit_json(result)
        return
    from calib.tables import overview, print_table

    print_table(overview(result["methods"]))
    times = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in result["seconds"].items())
    emit(textwrap.fill(f"time went to: {times}", shutil.get_terminal_size().columns))
    emit(f"report: {result['report']}")
    mixed, trained = out / "mixed", out / "runs" / "csm"
    emit("next, for example:")
    emit(f"  semix audit {mixed}    do the labels fit the images?")
    emit(f"  semix show {mixed} 40 --out series-40.png    one series")
    emit(f"  semix evaluate {trained} --set evaluation.bins=20    other bins, no training")


def standins(
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="folder of CLASS/ pictures, or a YAML file")
    ],
    out: Annotated[Path, typer.Option(metavar="MODELS", help="folder for the models")],
    set_: Annotated[list[str], setting("real.image_size=48")] = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Small models of your own pictures, to try everything with.

    Example:
      semix standins /data/birds --out models
    """
    from flows.standins import standins as make

    found = make(where, out, overrides=set_)
    if json:
        emit_json(found)
        return
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found["seconds"].items())
    emit(f"trained: {times}" if times else "the models were there")
    emit(
        f"of generated pictures {found['generated']:.0%} are read as intended, by a classifier of "
        f"the real ones that reads {found['real']:.0%} of the real test pictures right"
    )
    emit(
        "small stand-ins: neither Stable Diffusion nor OpenAI's CLIP; they know these classes alone"
    )
    emit(f"next: semix build {found['config']} --out ROOT")


def train(
    config: Config,
    out: Annotated[
        Path,
        typer.Option(metavar="RUN", help="its folder; machines that train together share it"),
    ],
    set_: Annotated[list[str], setting("epochs=300")] = [],  # noqa: B006 - typer copies it
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,  # it does by itself
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, help="processes over all machines, one a GPU")
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="start a trainer that was killed or crashed so often again"
        ),
    ] = 0,
    device: Annotated[Device, typer.Option(help="to train on")] = "auto",
    machines: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="machines that train together; run this on each of them",
            rich_help_panel=MORE,
        ),
    ] = 1,
    machine_rank: Annotated[
        int, typer.Option(metavar="N", min=0, help="which of them this is; 0 is the main one")
    ] = 0,
    main_process: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="of the main machine, as 10.0.0.1:29500")
    ] = "",
    json: Json = False,
) -> None:
    """Train and evaluate one method, all its seeds; or continue.

    Example:
      semix train csm.yaml --out runs/csm
    """
    from flows.train import train as run

    together = Machines(processes, machines, machine_rank, main_process, device)
    _show(run(config, out, overrides=set_, machines=together, restarts=restarts), as_json=json)


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a trained run")],
    set_: Annotated[list[str], setting("evaluation.bins=20")] = [],  # noqa: B006 - typer copies it
    device: Annotated[Device, typer.Option(help="to run networks on")] = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="run the networks even where logits are stored")
    ] = False,
    json: Json = False,
) -> None:
    """Measure a trained run anew: other bins, intervals or images.

    Example:
      semix evaluate runs/csm --set evaluation.bins=20
    """
    from flows.evaluate import evaluate as measure

    measure(run, overrides=set_, device=device, fresh=fresh)
    _show(run, as_json=json)


def _show(run: Path, *, as_json: bool) -> None:
    """What a run measured, and where that is."""
    from calib.results import load_evaluation, load_methods
    from calib.tables import details, print_table

    if as_json:
        emit_json(load_evaluation(run))
        return
    for table in details(load_methods([run])):
        print_table(table)
    emit(str(run / "evaluation.json"))


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="run folders; the first is the baseline")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="the page to write")] = (
        Path("report.html")
    ),
    mixed: Annotated[
        str, typer.Option(metavar="ROOT", help="default: what the runs trained on, if any")
    ] = "",
    title: Annotated[str, typer.Option(metavar="TEXT", help="of the page")] = "semix",
    json: Json = False,
) -> None:
    """Compare runs on one self-contained HTML page.

    Example:
      semix report runs/ce runs/csm --out report.html
    """
    from flows.report import report as write

    write(runs, out, mixed=mixed, title=title, as_json=json)
