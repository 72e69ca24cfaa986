"""How far a training is, as the artifact that grows: from the histories that its seeds write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from calib.config import TrainConfig
from calib.run_folder import HISTORY, seed_evaluation, seed_folder
from flows.artifacts.progress_artifact import growing_artifact
from flows.artifacts.publishing import only_shown


@contextmanager
def training_artifact(
    settings: TrainConfig, run: Path, *, key: str
) -> Iterator[Callable[[], None]]:
    """Yields a function that looks into the run folder and shows how many epochs are done."""
    with growing_artifact(key) as publish:

        def show() -> None:
            with only_shown():
                publish(*training_progress(settings, run))

        yield show


def training_progress(settings: TrainConfig, run: Path) -> tuple[float, str]:
    """The share that is done, 0 to 1, and the same in words.

    A seed that is measured counts in full, though it may have ended early.
    """
    epochs = settings.epochs + (settings.head.epochs if settings.head else 0)
    measured = [seed for seed in settings.seeds if seed_evaluation(run, seed).is_file()]
    trained = {seed: _epochs(seed_folder(run, seed) / HISTORY) for seed in settings.seeds}
    done = sum(epochs if seed in measured else trained[seed] for seed in settings.seeds)
    words = f"{len(measured)} of {len(settings.seeds)} seeds measured"
    going = [seed for seed in settings.seeds if seed not in measured and trained[seed]]
    words += "".join(f", seed {seed}: epoch {trained[seed]} of {epochs}" for seed in going)
    return min(1.0, done / (epochs * len(settings.seeds))), words


def _epochs(history: Path) -> int:
    return len(history.read_bytes().splitlines()) if history.is_file() else 0
