"""The files of a run: formats, names, checks before they are written, and the seed lock."""

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, get_args

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from semix.calib.config import OUTSIDE_IDENTITY, SMALL_STEM, Outside, TrainConfig
from semix.calib.stopping import Interrupted, ShouldStop, never
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.fingerprint import fingerprint
from semix.data.printable import print_line
from semix.data.settings import flat, in_words, load_settings, whole_section
from semix.data.store import Store

CONFIG = "config.json"
DATA = "data.json"
EVALUATION = "evaluation.json"
MODEL, HEAD = "model.safetensors", "head.safetensors"  # of a seed: weights of each stage
LINEAGE = "lineage.json"  # of a run with mixed images: `semix.data.lineage.Lineage`
HISTORY = "history.jsonl"  # of a seed: one line per epoch, over its stages
SCHEMA = 3  # of evaluation.json
StageName = Literal["base", "head"]  # as files and rows are named after it
SHOWN = 5  # settings named in one message
SECOND_RUN = "is not what this run began with; choose a fresh run folder or restore the setting"


class MixedRecord(TypedDict):
    """In data.json: the mixed dataset as it was opened."""

    url: str
    index: str
    digest: str
    labels: str | None
    exclude: dict[str, object] | None
    series: str


class DataRecord(TypedDict):
    """data.json: names and digests of all that a run reads."""

    real: str
    class_names: list[str]
    mixed: MixedRecord | None
    weights: NotRequired[str]  # digest of pretrained weights that the network begins with


# evaluation.json, of a run and of each seed

# As trained, then by post-hoc calibration: one temperature; an ensemble of that with the
# uncalibrated probabilities and with chance; scale and shift per class; the same, regularised
# towards one temperature; a matrix, regularised likewise; an isotonic map per class.
Kind = Literal["plain", "scaled", "ets", "vector", "svs", "sms", "isotonic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Intervals = dict[str, list[float]]  # both limits by measure


class Shift(TypedDict):
    """Corrupted test images; measures after temperature scaling begin with `scaled_`."""

    bins: int
    images: int
    mean: dict[str, float]
    corruptions: dict[str, dict[str, dict[str, float]]]  # by name, then by severity and "mean"


class Measures(TypedDict):
    """Measures of the test images, by kind of calibration."""

    bins: int
    temperature: float
    validation_accuracy: NotRequired[float]  # as trained
    plain: dict[str, float]
    scaled: dict[str, float]
    ets: dict[str, float]
    vector: dict[str, float]
    svs: dict[str, float]
    sms: dict[str, float]
    isotonic: dict[str, float]
    conformal: dict[str, dict[str, float]]  # of the scaled logits, by nonconformity score
    intervals: NotRequired[Intervals]  # of the plain measures
    posthoc_intervals: NotRequired[dict[str, Intervals]]  # of the other measures, by kind
    drawn: NotRequired[
        dict[str, dict[str, list[float]]]
    ]  # by kind and measure: `semix.calib.replicates`


class Row(Measures):
    """Measures of one stage of one seed."""

    stage: StageName
    seed: int
    logits: str  # a path below the run
    source: str  # digest of the settings, data and weights behind the logits
    shift: NotRequired[Shift]
    ood: NotRequired[dict[str, dict[str, float]]]  # by OOD dataset and "mean"


class SeedEvaluation(TypedDict):
    """evaluation.json of a seed: its settings and the measures of its stages."""

    schema: int
    config: dict[str, object]
    evaluation: dict[str, object]
    digest: str
    training_seconds: float
    seconds: float  # of training and measuring
    rows: list[Row]


class Evaluation(TypedDict):
    """evaluation.json of a run: the rows of all seeds.

    Attributes:
        warnings: reasons to distrust the figures, each with a remedy.
    """

    schema: int
    name: str
    digest: str
    evaluation: dict[str, object]
    seconds: float
    versions: dict[str, str]
    warnings: NotRequired[list[str]]
    rows: list[Row]


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Turn errors in reading a file of a run, which may come from elsewhere, into InputError.

    Raises:
        InputError: the file is damaged, or has another content; names the file.
    """
    try:
        yield
    except (InputError, FileNotFoundError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        lines = str(error).splitlines()[:3]
        reason = f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}"
        raise InputError("run", path, f"is damaged ({reason}); restore it from a copy") from None


def seed_folder(run: Path, seed: int) -> Path:
    return run / f"seed-{seed}"


def seed_evaluation(run: Path, seed: int) -> Path:
    """Path of a seed's evaluation, which is written last: a seed that has one is done."""
    return seed_folder(run, seed) / EVALUATION


def evaluation_beside(run: Path, config: TrainConfig) -> Path:
    """Path of an evaluation under other settings than the run's: `evaluation-1a2b3c4d.json`."""
    name, suffix = EVALUATION.split(".")
    digest = fingerprint(config.evaluation.model_dump(mode="json"))
    return run / f"{name}-{digest[:8]}.{suffix}"


def measured_seed(run: Path, seed: int) -> SeedEvaluation | None:
    """The evaluation of a seed; None if it is not done."""
    path = seed_evaluation(run, seed)
    evaluation: SeedEvaluation | None = read_json(path) if path.is_file() else None
    return evaluation


def claim_run(config: TrainConfig, run: Path) -> Path:
    """Write the resolved settings to `config.json`, the file that `semix.calib.train` reads.

    A run folder in which no seed was begun accepts any settings.

    Returns:
        The path of config.json.
    Raises:
        InputError: seeds were begun under other settings, which are named; or the folder is not
            empty and no run folder.
    """
    check_same_config(config, run)
    path = run / CONFIG
    write_json(path, config.model_dump(mode="json"))
    return path


def check_same_config(config: TrainConfig, run: Path) -> None:
    """Raises InputError as `claim_run`, and writes nothing."""
    path = run / CONFIG
    if not is_run(run):
        Store(str(run)).require_empty_or_own("training run")
    if path.is_file() and _begun(run):
        check_stored_settings(read_json(path), config.model_dump(mode="json"), run)


def stored_settings(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of a run folder's `config.json`.

    Raises:
        InputError: they cannot be read, or they now describe another network than was trained:
            before the ImageNet stem existed, large images had the small one.
    """
    with damage_of(run / CONFIG):
        values = dict(read_json(run / CONFIG))
        config = load_settings(TrainConfig, values, overrides)
    if _lacks_stem(values, config):
        remedy = f"the run was trained with the stem for small images; write `stem: {SMALL_STEM}`"
        remedy += " beside the model's name there to measure it, or train it anew"
        raise InputError(f"{run / CONFIG} model.stem", None, remedy)
    return config


def _lacks_stem(values: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether loading the settings of a run has added a stem that it was not trained with."""
    return "stem" in config.model.params and "stem" not in values["model"]


def trained_run(run: Path) -> TrainConfig:
    """The settings of a run whose seeds are all trained.

    Raises:
        InputError: the folder is missing or no run folder, or the run is not finished.
    """
    if not run.is_dir():
        raise InputError("run", run, "there is no such folder; name that of a trained run")
    if not (run / CONFIG).is_file():
        raise InputError("run", run, f"holds no {CONFIG}; name the folder of a trained run")
    config = stored_settings(run)
    name = MODEL if config.head is None else HEAD
    for seed in config.seeds:
        if not (seed_folder(run, seed) / name).is_file():
            finish = f"semix train {run / CONFIG} --out {run}"
            raise InputError("run", run, f"seed {seed} is not trained; finish it with `{finish}`")
    return config


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a training run; model folders have a config.json, too."""
    try:
        return {"seeds", "real", "loss"} <= set(read_json(folder / CONFIG))
    except (OSError, ValueError, TypeError):
        return False


def read_data(run: Path) -> DataRecord:
    """Read `data.json`. Raises InputError if it is damaged or missing."""
    path = run / DATA
    if not path.is_file():
        raise InputError("run", path, "is not there; name a run whose training was begun")
    with damage_of(path):
        record: DataRecord = read_json(path)
        if not isinstance(record["real"], str):
            raise TypeError("real is no digest")
    return record


def pin_data(data: DataRecord, run: Path) -> None:
    """Write `data.json`, digests of the real data and the pinned mixed index, or compare with it.

    Raises:
        InputError: seeds were begun on other data.
    """
    path = run / DATA
    if path.is_file() and _begun(run):
        pinned = read_json(path)
        if pinned != data:
            field = next(key for key, value in data.items() if pinned.get(key) != value)
            raise InputError(f"{path} {field}", pinned.get(field), SECOND_RUN)
    else:
        write_json(path, data)


def pinned_index(run: Path) -> str | None:
    """The mixed index that this run began with, so that resuming ignores newer ones."""
    mixed = read_data(run)["mixed"] if (run / DATA).is_file() and _begun(run) else None
    return None if mixed is None else mixed["index"]


def is_measured(config: TrainConfig, run: Path) -> bool:
    """Whether `evaluation.json` has exactly these seeds, trained and measured as configured."""
    if not ((run / EVALUATION).is_file() and (run / CONFIG).is_file()):
        return False
    values, evaluation = read_json(run / CONFIG), read_json(run / EVALUATION)
    begun = TrainConfig.model_validate(values)
    if _lacks_stem(values, begun):
        return False
    seeds = {row["seed"] for row in evaluation["rows"]}
    as_trained = begun.identity() == config.identity() and seeds == set(config.seeds)
    return as_trained and measured_as(config, evaluation)


def measured_as(config: TrainConfig, evaluation: Mapping[str, object]) -> bool:
    """Whether an evaluation.json, of a run or a seed, was measured under these settings.

    They are outside the identity of a run: other settings measure it again without training.
    """
    settings = config.evaluation.model_dump(mode="json")
    return evaluation.get("schema") == SCHEMA and evaluation.get("evaluation") == settings


def stale_evaluations(config: TrainConfig, run: Path) -> list[int]:
    """Seeds measured under other settings, once all seeds of the run are measured; else none."""
    evaluations = {seed: measured_seed(run, seed) for seed in config.seeds}
    done = {seed: evaluation for seed, evaluation in evaluations.items() if evaluation is not None}
    if len(done) < len(evaluations):
        return []
    return [seed for seed, evaluation in done.items() if not measured_as(config, evaluation)]


def run_digest(config: TrainConfig, data: DataRecord) -> str:
    """Digest of settings and data: equal digests and seeds train equal models."""
    return fingerprint({"config": config.identity(), "data": dict(data)})


def check_stored_settings(
    stored: Mapping[str, object], requested: Mapping[str, object], run: Path
) -> None:
    """Raises InputError if settings that training depends on differ; names them."""
    old, new = flat(_identity(stored)), flat(_identity(requested))
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if differing:
        names = dict.fromkeys(whole_section(name, old, new) for name in differing)
        shown = [f"{n}: {in_words(old, n)} there, {in_words(new, n)} now" for n in names]
        if len(shown) > SHOWN:
            shown[SHOWN:] = [f"and {len(shown) - SHOWN} more"]
        remedy = f"was begun with other settings ({'; '.join(shown)}); choose a fresh run folder"
        raise InputError("run", run, f"{remedy} or restore them")


def _begun(run: Path) -> bool:
    return any(run.glob("seed-*"))


def _identity(
    settings: Mapping[str, object], outside: Outside = OUTSIDE_IDENTITY
) -> dict[str, object]:
    """As `TrainConfig.identity`, for settings that another version may have written."""
    identity = {name: value for name, value in settings.items() if outside.get(name) is not True}
    for name, within in outside.items():
        below = identity.get(name)
        if isinstance(within, Mapping) and isinstance(below, Mapping):
            identity[name] = _identity(below, within)
    return identity


LOCK = ".lock"
# An earlier trainer whose flow was killed has two minutes to write its checkpoint.
LOCK_TIMEOUT_S = 150.0
LOCK_POLL_S = 0.2


@contextmanager
def seed_lock(folder: Path, *, label: str, stop: ShouldStop = never) -> Iterator[None]:
    """Hold the lock of a seed's folder; the kernel releases it however this process ends.

    Args:
        label: begins the line that is printed while waiting.
    Raises:
        InputError: another training holds the lock and does not end.
        Interrupted: `stop` returned true before the lock was acquired.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            _acquire(file, folder, label=label, stop=stop)
        except OSError as error:  # not every network's file system has locks
            text = f"{label}: {folder} has no lock ({error.strerror}); train it once at a time"
            print_line(text)
        yield


def _acquire(file: IO[str], folder: Path, *, label: str, stop: ShouldStop) -> None:
    deadline, announced = time.monotonic() + LOCK_TIMEOUT_S, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if stop():
            raise Interrupted(f"{label}: stopped before it was begun")
        if time.monotonic() > deadline:
            remedy = f"another training works in {folder.name}; wait for its end, or stop it"
            raise InputError("run", folder.parent, remedy)
        if not announced:
            print_line(f"{label}: waiting for another training in {folder} to end")
            announced = True
        time.sleep(LOCK_POLL_S)
