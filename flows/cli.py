"""The command line: `semix`. Commands import what they need when they run."""

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from data.errors import InputError
from data.ranges import parse_ranges
from flows.costs import SHARE
from flows.errors import RunFailed
from flows.terminal import emit, emit_facts, emit_json, say, say_error, set_up_logging

if TYPE_CHECKING:
    from data.root import Root

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make images between two classes, label them with CLIP, train calibrated classifiers.",
)

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit statuses

Config = Annotated[Path, typer.Argument(help="YAML file", show_default=False)]
Url = Annotated[str, typer.Argument(help="root of a mixed dataset", show_default=False)]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="as mixing.seed=7")]
Slots = Annotated[int, typer.Option(min=0, help="worker processes; 0: one a GPU, or one")]
Shards = Annotated[str, typer.Option(help="only these shards, as in 3,7-9")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="tracebacks and every log line")] = False,
) -> None:
    if debug:
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    set_up_logging(debug=debug)


@app.command()
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


@app.command()
def build(
    config: Config,
    out: Annotated[str, typer.Option(help="root of the mixed dataset: a path or URL")],
    set_: Set = [],  # noqa: B006 - typer copies it
    slots: Slots = 0,
    shards: Shards = "",
    check: Annotated[bool, typer.Option(help="validate, estimate, and make nothing")] = False,
    time: Annotated[bool, typer.Option("--time", help="check, and time a warm batch")] = False,
    share: Annotated[float, typer.Option(help="of the device's rate, for the estimate")] = SHARE,
    rate: Annotated[float | None, typer.Option(help="TFLOP/s of the device; else measured")] = None,
    device: Annotated[str, typer.Option(help="for the estimate: auto, cpu, cuda")] = "auto",
    json: Json = False,
) -> None:
    """Start a mixed dataset, or continue it."""
    from data.settings import load_settings
    from flows import build as building
    from pipeline.config import BuildConfig

    settings = load_settings(BuildConfig, config, set_)
    if check or time:
        from flows.cost_words import readable

        facts = building.check(settings, out, share=share, rate=rate, device=device, time=time)
        emit_facts(facts if json else readable(facts), as_json=json)
        return
    show(building.build(settings, out, slots=slots or None, shards=chosen(shards)), json)


@app.command()
def resume(url: Url, slots: Slots = 0, shards: Shards = "", json: Json = False) -> None:
    """Make what a mixed dataset lacks, from its root alone."""
    from data.root import Root
    from flows import build as building

    show(building.resume(Root(url), slots=slots or None, shards=chosen(shards)), json)


@app.command()
def status(url: Url, json: Json = False) -> None:
    """What is done, missing and failed, from the store alone."""
    from data.root import Root

    show(Root(url), json)


@app.command()
def verify(
    url: Url,
    full: Annotated[bool, typer.Option(help="also every hash and image")] = False,
    json: Json = False,
) -> None:
    """Compare every committed shard with its record; exit status 1 if one is damaged."""
    from data.root import Root

    root = Root(url)
    problems = root.verify(full=full)
    if json:
        emit_json([{"shard": problem.shard, "problem": problem.text} for problem in problems])
    else:
        emit("\n".join(map(str, problems)) or f"{len(root.committed())} shards as recorded")
    raise typer.Exit(1 if problems else 0)


@app.command()
def failures(url: Url, json: Json = False) -> None:
    """Why shards that are still missing failed."""
    from data.root import Root

    found = Root(url).failures()
    if json:
        emit_json(found)
        return
    for shard, attempts in found.items():
        last = attempts[-1]
        emit(f"shard {shard}, attempt {last['attempt']}: {last['error']}: {last['message']}")
    if not found:
        emit("no failures")


@app.command()
def browse(
    url: Url,
    out: Annotated[Path, typer.Option(help="the picture to write, PNG or WebP")] = Path(
        "series.png"
    ),
    groups: Annotated[str, typer.Option(help="as in 3,7-9; default: some of all pairs")] = "",
) -> None:
    """A contact sheet of series with alpha, CLIP weight and soft label."""
    from data.contact_sheet import contact_sheet
    from data.root import Root
    from data.series import read_series, some_of_all_pairs

    root = Root(url)
    wanted = sorted(chosen(groups)) if groups else some_of_all_pairs(root)
    contact_sheet(read_series(root, wanted)).save(out)
    emit(str(out))


@app.command()
def train(
    config: Config,
    out: Annotated[Path, typer.Option(help="run folder")],
    set_: Set = [],  # noqa: B006 - typer copies it
    resume: Annotated[bool, typer.Option("--resume", help="continue from checkpoints")] = False,
    processes: Annotated[int, typer.Option(min=1, help="processes, one a GPU")] = 1,
    json: Json = False,
) -> None:
    """Train and evaluate one method, all its seeds, through accelerate."""
    from flows.train import train as run

    folder = run(config, out, overrides=set_, resume=resume, num_processes=processes)
    if json:
        from data.files import read_json

        emit_json(read_json(folder / "evaluation.json"))
    else:
        emit(str(folder / "evaluation.json"))


@app.command()
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


def show(root: "Root", as_json: bool) -> None:
    """How far a root is, and how fast it went."""
    from flows.progress import by_stage, standing

    found = root.progress()
    facts = {**root.status(), **standing(found)}
    if not as_json:
        facts["stages"] = by_stage(found.stages)
    emit_facts(facts, as_json=as_json)


def chosen(shards: str) -> frozenset[int]:
    return parse_ranges(shards) if shards else frozenset()


def main() -> None:
    # A flag for the whole program, but people add it where they are: at the end.
    arguments = sorted(sys.argv[1:], key=lambda argument: argument != "--debug")
    signal.signal(signal.SIGTERM, _leave)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars, between our own
    try:
        app(arguments, prog_name="semix")
    except SystemExit as end:
        if end.code in STOPPED:
            say("stopped; what was committed stays, and the same command goes on")
        raise
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.exit(explain(error))


def explain(error: Exception) -> int:
    """Say what went wrong; returns the exit status."""
    if isinstance(error, InputError | RunFailed):
        say_error(str(error))
        return error.exit_status if isinstance(error, RunFailed) else 2
    say_error(f"{type(error).__name__}: {error}")
    say("this is not your input; --debug shows where")
    return 1


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
