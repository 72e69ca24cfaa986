"""Experiment trackers: send the figures of every epoch to TensorBoard, MLflow and W&B."""

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from semix.data.files import read_json, write_json
from semix.data.printable import print_line
from semix.data.settings import flat

TENSORBOARD = "tensorboard"  # folder in that of the seed
EVENTS = "events.out.tfevents.*"  # files in it
SENT = "trackers.json"  # in the seed's folder: ids of the services' runs, and epochs sent
SERVICES = ("mlflow", "wandb")
PROJECT = "semix"

Line = Mapping[str, str | float | None]  # of history.jsonl


class Sent(TypedDict, total=False):
    """trackers.json."""

    sent: dict[str, int]  # the last position, by tracker
    mlflow: str  # ids of the runs
    wandb: str


class Tracking:
    """Sends the epochs of one seed to its trackers, in the main process.

    `history.jsonl` is the record; trackers show it. An error of a tracker becomes a warning, and
    that tracker is not used again: no service and no full disk ends a training. A resumed seed
    continues the same run, with each epoch once: TensorBoard's events are written again from the
    history, services get the epochs that they lack.

    Args:
        accelerator: its `log_with` names the trackers.
        folder: of the seed.
        label: of the run in a service.
        settings: of the run, nested plain values.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, *, label: str, settings: Mapping[str, object]
    ) -> None:
        self.accelerator, self.folder, self.label = accelerator, folder, label
        self.settings = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in flat(settings).items()
        }
        self._open: dict[str, GeneralTracker] = {}
        self._state: Sent = {}

    def start(self, history: Sequence[Line]) -> None:
        """Open the trackers and send them the history."""
        path = self.folder / SENT
        self._state = {"sent": {}, **(read_json(path) if path.is_file() else {})}
        for name in map(str, self.accelerator.log_with):
            self._guarded(name, partial(self._begin, name))
        for position, line in enumerate(history, 1):
            self.note(position, line)

    def note(self, position: int, line: Line) -> None:
        """Send the figures of an epoch.

        Args:
            position: epochs done, this one included, over all stages.
        """
        stage = line["stage"]
        figures = {
            f"{stage}/{name}": value
            for name, value in line.items()
            if name not in ("stage", "epoch") and value is not None
        }
        for name in list(self._open):
            self._guarded(name, partial(self._send, name, figures, position))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.finish)
        self._open.clear()

    def _begin(self, name: str) -> None:
        tracker = self._opened(name)
        self._open[name] = tracker
        if name == TENSORBOARD:
            # TensorBoard's hparams would create a second run in a folder named after the time.
            tracker.log({"settings": _table(self.settings)})
        else:
            tracker.store_init_configuration(self.settings)
        if name == "mlflow":
            self._state["mlflow"] = tracker.tracker.info.run_id

    def _opened(self, name: str) -> GeneralTracker:
        """Open one tracker through accelerate, alone, so that an error belongs to it."""
        owner, project = self.accelerator, PROJECT
        if name == TENSORBOARD:
            for events in (self.folder / TENSORBOARD).glob(EVENTS):
                events.unlink()
            self._state["sent"].pop(TENSORBOARD, None)
            owner.project_configuration.logging_dir, project = str(self.folder), TENSORBOARD
        named, owner.log_with, owner.trackers = owner.log_with, [name], []
        try:
            owner.init_trackers(project, init_kwargs={name: self._options(name)})
            return owner.trackers[0]
        finally:
            owner.log_with, owner.trackers = named, list(self._open.values())

    def _options(self, name: str) -> dict[str, object]:
        """Arguments with which a service resumes its run."""
        if name == "mlflow":
            return {"run_id": self._state.get("mlflow"), "run_name": self.label}
        if name == "wandb":
            run_id = self._state.setdefault("wandb", uuid.uuid4().hex)
            return {"id": run_id, "resume": "allow", "name": self.label, "dir": str(self.folder)}
        return {}

    def _send(self, name: str, figures: Mapping[str, object], position: int) -> None:
        sent = self._state["sent"]
        if position > sent.get(name, 0):
            self._open[name].log(dict(figures), step=position)
            sent[name] = position
            if name in SERVICES:
                write_json(self.folder / SENT, self._state)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the services' libraries may raise any exception
            self._open.pop(name, None)
            text = f"warning: {self.label}: {name} failed ({error or type(error).__name__})"
            print_line(f"{text}; training goes on, history.jsonl has all", file=sys.stderr)


def _table(settings: Mapping[str, object]) -> str:
    """The settings as a Markdown table, which TensorBoard shows as text."""
    rows = [f"| {name} | {value} |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])
