"""The whole story on bundled handwriting: small models, mixed dataset, four methods, a report."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.config import TrainConfig
from calib.run_folder import EVALUATION
from data.errors import InputError
from data.files import read_json, write_json
from data.fingerprint import file_digest, fingerprint
from data.real import RealDataset, load_real
from data.root import Root
from data.settings import load_settings
from flows.build import build
from flows.server import prefect_server
from flows.train import train
from pipeline.config import BuildConfig
from pipeline.standins import train_standins

if TYPE_CHECKING:  # torch costs seconds that a run with nothing to do need not spend
    from calib.mixed_quality import Agreement
    from data.mixed import MixedDataset

CONFIGS = Path(__file__).parents[1] / "configs" / "quickstart"
METHODS = ("ce", "csm", "csm-fedlas")  # csm.yaml has a MaC-Cal head stage: the fourth method
LIMITS = [
    "The generator and CLIP are small models, trained for a minute or two on the same training "
    "digits; they are neither Stable Diffusion nor OpenAI's CLIP.",
    "This is one split of one small dataset. On another, close methods can change places.",
]

log = logging.getLogger("semix.quickstart")


def main(out: Path, *, seeds: int) -> dict[str, Any]:
    """Make every step below `out`; what is there and unchanged is not made again.

    Returns:
        The report's path, its table, and the seconds of each step when it was last made.
    Raises:
        InputError: the folder cannot be used, or holds a quickstart of other settings.
        RunFailed: the build or a training failed; the same command goes on.
    """
    out = out.absolute()
    Store(str(out)).check_writable()
    clock = Clock(out / "seconds.json")
    real = load_real(load_settings(BuildConfig, CONFIGS / "build.yaml").real)
    models = train_standins(real, out / "standins")
    clock.note("small models", sum(models.seconds.values()))
    with ExitStack() as stack:
        mixed = make_mixed(models, out / "mixed", clock, stack)
        runs = [train_method(name, mixed, out / "runs", seeds, clock, stack) for name in METHODS]
    report = make_report(out, real=real, mixed=mixed, runs=runs, clock=clock)
    return {"report": str(report), "methods": summary(runs), "seconds": clock.seconds}


class Clock:
    """Seconds by step, kept on disk: a step that is not made again keeps its time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = read_json(path) if path.is_file() else {}

    def note(self, step: str, seconds: float) -> None:
        """Remember what a step took; 0 means that it was not made."""
        if seconds:
            self.seconds[step] = round(seconds, 1)
            write_json(self.path, self.seconds)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        log.info("%s", name)
        start = time.monotonic()
        yield
        self.note(name, time.monotonic() - start)


def make_mixed(models: StandIns, place: Path, clock: Clock, stack: ExitStack) -> Root:
    """Build the mixed dataset, or what is missing of it."""
    given = [
        f"generator.model={models.diffusion}",
        f"annotation.model=local-dir:{models.clip}",
    ]
    config = load_settings(BuildConfig, CONFIGS / "build.yaml", given)
    root = create_root(config, str(place))
    if root.missing():
        with clock.step("Prefect server"):
            stack.enter_context(prefect_server())
        with clock.step("mixed dataset"):
            build(config, str(place), slots=min(2, os.cpu_count() or 1))
    root.write_index()
    return root
