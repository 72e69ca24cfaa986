"""The command line: `semix`. Commands import what they need when they run."""

import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from types import FrameType
from typing import Annotated

import typer

from semix.data.errors import InputError
from semix.data.files import DISK_FULL
from semix.data.installation import DISTRIBUTION
from semix.data.printable import print_traceback
from semix.flows.commands import looking, making, operating, training, using
from semix.flows.commands.help_pages import CommandPage, CommandsPage
from semix.flows.failures import RunFailed
from semix.flows.server_probe import describe_request_error
from semix.flows.terminal import emit, print_error, say, set_up_logging

app = typer.Typer(
    cls=CommandsPage,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make mixed images of two classes, label them with CLIP, train calibrated classifiers.",
)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Make": (
        making.quickstart,
        making.build,
        making.resume,
        making.extend,
        making.relabel,
        making.export,
        making.standins,
    ),
    "Look": (
        looking.status,
        looking.failures,
        looking.verify,
        looking.browse,
        looking.show,
        looking.audit,
    ),
    "Train": (training.train, training.evaluate, training.study, training.loop, training.report),
    "Use": (using.predict, using.export_classifier),
    "Operate": (operating.doctor, operating.config, operating.gc),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(cls=CommandPage, rich_help_panel=panel)(command)

# Commands that save their work step by step and continue it when they are given again.
RESUMABLE = ("quickstart", "build", "resume", "extend", "relabel", "train", "study", "loop")
# Exit statuses of a command that was interrupted or terminated.
STOP_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _version(requested: bool) -> None:
    if requested:
        emit(f"semix {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="tracebacks and every log line")] = False,
) -> None:
    if debug:
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    set_up_logging(debug=debug)


def main() -> None:
    # --debug belongs before the command, but people add it at the end of the line.
    arguments = sorted(sys.argv[1:], key=lambda argument: argument != "--debug")
    signal.signal(signal.SIGTERM, _exit_with_signal_status)
    resumable = next((a for a in arguments if not a.startswith("-")), "") in RESUMABLE
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries would break into ours
    try:
        app(arguments, prog_name="semix")
    except SystemExit as exit_request:
        if exit_request.code in STOP_STATUSES:
            hint = "; committed work stays, and the same command goes on"
            say(f"stopped{hint if resumable else ''}")
        raise
    except Exception as error:
        if "--debug" in arguments:
            print_traceback()
        sys.exit(explain(error, resumable=resumable))


def explain(error: Exception, *, resumable: bool) -> int:
    """Print what went wrong; return the exit status.

    Args:
        resumable: whether the same command, given again, continues the work.
    """
    if isinstance(error, InputError | RunFailed):
        print_error(str(error))
        return error.exit_status if isinstance(error, RunFailed) else 2
    request = describe_request_error(error)
    print_error(request or _full_disk(error) or f"{type(error).__name__}: {error}")
    if request or isinstance(error, OSError):  # the cause is a disk, a store or a network
        if resumable:
            say("committed work stays; once the cause is removed, the same command goes on")
    else:
        say("this is a fault of the program, not of your input; --debug shows where")
    return 1


def _full_disk(error: Exception) -> str:
    """The message for a full disk, with the path; empty for other errors."""
    if not isinstance(error, OSError) or error.errno not in DISK_FULL:
        return ""
    location = f" at {error.filename}" if error.filename else ""
    return f"the disk is full{location}; free some space, or choose another place"


def _exit_with_signal_status(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
