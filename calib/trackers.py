"""Experiment trackers: send the metrics of every epoch to TensorBoard, MLflow and W&B."""

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

TENSORBOARD = "tensorboard"  # folder in the seed's folder
EVENTS = "events.out.tfevents.*"  # its files
SENT = "trackers.json"  # in the seed's folder; see `SentRecord`
SERVICES = ("mlflow", "wandb")
PROJECT = "semix"

Line = Mapping[str, str | float | None]  # of history.jsonl


class SentRecord(TypedDict, total=False):
    """trackers.json: what was sent to the trackers, and the ids of their runs."""

    sent: dict[str, int]  # number of epochs sent over all stages, by tracker
    mlflow: str  # id of the run there
    wandb: str  # id of the run there


class Tracking:
    """Sends the epochs of one seed to its trackers, in the main process.

    `history.jsonl` has the metrics; trackers show them. If a tracker fails, a warning is printed
    and that tracker is not used again, so that no service and no full disk ends a training. A
    resumed seed continues its runs in the trackers, with each epoch once: TensorBoard's events are
    written again from the history, the services get the epochs that they do not have.

    Args:
        accelerator: its `log_with` names the trackers.
        folder: the seed's folder.
        label: name of the run in a service.
        settings: of the run: nested mappings of plain values.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, *, label: str, settings: Mapping[str, object]
    ) -> None:
        self.accelerator, self.folder, self.label = accelerator, folder, label
        self.settings = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in flat(settings).items()
        }
        self._trackers: dict[str, GeneralTracker] = {}
        self._record: SentRecord = {}

    def start(self, history: Sequence[Line]) -> None:
        """Open the trackers and send them the history."""
        path = self.folder / SENT
        self._record = {"sent": {}, **(read_json(path) if path.is_file() else {})}
        for name in map(str, self.accelerator.log_with):
            self._call_safely(name, partial(self._start_tracker, name))
        for position, line in enumerate(history, 1):
            self.note(position, line)

    def note(self, position: int, line: Line) -> None:
        """Send the metrics of an epoch.

        Args:
            position: number of epochs done over all stages, including this one.
            line: of history.jsonl.
        """
        stage = line["stage"]
        metrics = {
            f"{stage}/{name}": value
            for name, value in line.items()
            if name not in ("stage", "epoch") and value is not None
        }
        for name in list(self._trackers):
            self._call_safely(name, partial(self._send, name, metrics, position))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._call_safely(name, tracker.finish)
        self._trackers.clear()

    def _start_tracker(self, name: str) -> None:
        tracker = self._open_tracker(name)
        self._trackers[name] = tracker
        if name == TENSORBOARD:
            # As text: hparams would create a second run, in a folder named after the time.
            tracker.log({"settings": _markdown_table(self.settings)})
        else:
            tracker.store_init_configuration(self.settings)
        if name == "mlflow":
            self._record["mlflow"] = tracker.tracker.info.run_id

    def _open_tracker(self, name: str) -> GeneralTracker:
        """Open one tracker through accelerate, without the others, so that an error is its own."""
        accelerator, project = self.accelerator, PROJECT
        if name == TENSORBOARD:
            for events in (self.folder / TENSORBOARD).glob(EVENTS):
                events.unlink()
            self._record["sent"].pop(TENSORBOARD, None)
            accelerator.project_configuration.logging_dir, project = str(self.folder), TENSORBOARD
        all_names = accelerator.log_with
        accelerator.log_with, accelerator.trackers = [name], []
        try:
            accelerator.init_trackers(project, init_kwargs={name: self._options(name)})
            return accelerator.trackers[0]
        finally:
            accelerator.log_with = all_names
            accelerator.trackers = list(self._trackers.values())

    def _options(self, name: str) -> dict[str, object]:
        """Arguments for a service to create its run, or to continue it."""
        if name == "mlflow":
            return {"run_id": self._record.get("mlflow"), "run_name": self.label}
        if name == "wandb":
            run_id = self._record.setdefault("wandb", uuid.uuid4().hex)
            return {"id": run_id, "resume": "allow", "name": self.label, "dir": str(self.folder)}
        return {}

    def _send(self, name: str, metrics: Mapping[str, object], position: int) -> None:
        sent = self._record["sent"]
        if position > sent.get(name, 0):
            self._trackers[name].log(dict(metrics), step=position)
            sent[name] = position
            if name in SERVICES:
                write_json(self.folder / SENT, self._record)

    def _call_safely(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # libraries of trackers may raise any exception
            self._trackers.pop(name, None)
            text = f"warning: {self.label}: {name} failed ({error or type(error).__name__})"
            print_line(
                f"{text}; training continues, history.jsonl has all metrics", file=sys.stderr
            )


def _markdown_table(settings: Mapping[str, object]) -> str:
    """The settings as a Markdown table, which TensorBoard shows as text."""
    rows = [f"| {name} | {value} |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])
