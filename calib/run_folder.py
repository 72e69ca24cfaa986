"""The files of a run folder: their formats and names, checks, and the lock of a seed."""

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NotRequired

from pydantic import ValidationError
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from semix.calib.config import (
    NON_IDENTITY_SETTINGS,
    EvaluationConfig,
    SettingNames,
    TrainConfig,
)
from semix.calib.config.model import SMALL_STEM
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
EXPORTS = "exports.json"  # where the run's classifier was exported to
MODEL, HEAD = "model.safetensors", "head.safetensors"  # of a seed: the weights of each stage
LINEAGE = "lineage.json"  # if mixed images are used: `semix.data.lineage.Lineage`
HISTORY = "history.jsonl"  # of a seed: one line per epoch, over its stages
SCHEMA = 4  # of evaluation.json
StageName = Literal["base", "head"]  # as in names of files and in rows of evaluation.json
MAX_NAMED_SETTINGS = 5  # in one error message
OTHER_DATA_REMEDY = (
    "is not what this run began with; choose a fresh run folder or restore the setting"
)


class MixedRecord(TypedDict):
    """The mixed dataset in data.json, with what selects its images and labels."""

    url: str
    index: str
    digest: str
    labels: str | None
    exclude: dict[str, object] | None
    flags: NotRequired[int]  # number of files of flags that were read, if the exclusion needs any
    series: str


class DataRecord(TypedDict):
    """data.json: class names, and digests of all data that a run reads."""

    real: str
    class_names: list[str]
    mixed: MixedRecord | None
    weights: NotRequired[str]  # digest of the pretrained weights, if the run has any


# evaluation.json, of a run and of each seed

Intervals = dict[str, list[float]]  # lower and upper limit, by measure


class Shift(TypedDict):
    """Measures on corrupted test images; those of a calibrator begin with its name and `_`."""

    bins: int
    images: int
    mean: dict[str, float]
    corruptions: dict[str, dict[str, dict[str, float]]]  # by name, then by severity and "mean"


class Measures(TypedDict):
    """Measures on test images."""

    bins: int
    temperature: float
    validation_accuracy: NotRequired[float]  # as trained
    kinds: dict[str, dict[str, float]]  # measures by kind of calibration: `semix.calib.calibrators`
    conformal: dict[str, dict[str, float]]  # of the scaled logits, by nonconformity score
    intervals: NotRequired[dict[str, Intervals]]  # by kind
    # Measures on bootstrap resamples, by kind and measure, for `semix.calib.replicates`.
    resamples: NotRequired[dict[str, dict[str, list[float]]]]


class Row(Measures):
    """Measures of one stage of one seed, or of the ensemble of all seeds."""

    stage: StageName
    seed: int | None  # None for the ensemble
    logits: str  # a path in the run folder
    source: str  # digest of the settings, data and weights that determine the logits
    shift: NotRequired[Shift]
    ood: NotRequired[dict[str, dict[str, float]]]  # by OOD dataset, and "mean"


class SeedEvaluation(TypedDict):
    """evaluation.json of a seed: its settings, and the measures of its stages."""

    schema: int
    config: dict[str, object]
    evaluation: dict[str, object]
    digest: str
    training_seconds: float
    seconds: float  # of training and measuring
    rows: list[Row]


class Evaluation(TypedDict):
    """evaluation.json of a run.

    Attributes:
        rows: those of the seeds, then those of their ensemble, if it is measured.
        warnings: reasons not to trust the measures, each with a remedy.
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
def report_damage(path: Path) -> Iterator[None]:
    """Within this context, errors in reading a file of a run become InputErrors that name it.

    Raises:
        InputError: the file is damaged, or its content is not what it should be.
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


def logits_file(run: Path, seed: int, stage: StageName) -> Path:
    """The file with a seed's logits of validation and test images."""
    return seed_folder(run, seed) / f"logits-{stage}.safetensors"


def seed_evaluation_path(run: Path, seed: int) -> Path:
    """The path of a seed's evaluation, which is written last: with it, the seed is done."""
    return seed_folder(run, seed) / EVALUATION


def other_evaluation_path(run: Path, config: TrainConfig) -> Path:
    """The path of an evaluation with other settings than the run's: evaluation-1a2b3c4d.json."""
    name, suffix = EVALUATION.split(".")
    digest = fingerprint(config.evaluation.model_dump(mode="json"))
    return run / f"{name}-{digest[:8]}.{suffix}"


def read_seed_evaluation(run: Path, seed: int) -> SeedEvaluation | None:
    """Read the evaluation of a seed; None if it is not measured."""
    path = seed_evaluation_path(run, seed)
    evaluation: SeedEvaluation | None = read_json(path) if path.is_file() else None
    return evaluation


def claim_run(config: TrainConfig, run: Path) -> Path:
    """Write the resolved settings to `config.json`, which `semix.calib.train` reads.

    As long as no seed has begun, the settings may change.

    Returns:
        The path of config.json.
    Raises:
        InputError: seeds have begun with other settings, which the error names; or the folder is
            not a run folder and not empty.
    """
    check_same_config(config, run)
    path = run / CONFIG
    write_json(path, config.model_dump(mode="json"))
    return path


def check_same_config(config: TrainConfig, run: Path) -> None:
    """Raise InputError as `claim_run` does, but write nothing."""
    path = run / CONFIG
    if not is_run(run):
        Store(str(run)).require_empty_or_own("training run")
    if path.is_file() and _has_begun_seeds(run):
        check_stored_settings(read_json(path), config.model_dump(mode="json"), run)


def stored_settings(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load the settings in a run folder's `config.json`.

    Raises:
        InputError: the file is damaged, or the settings describe another network than the one that
            was trained: an earlier version stored no stem and used that for small images at every
            size, where the default is now ImageNet's for large ones.
    """
    with report_damage(run / CONFIG):
        values = dict(read_json(run / CONFIG))
        config = load_settings(TrainConfig, values, overrides)
    if _lacks_stem(values, config):
        remedy = f"the run was trained with the stem for small images; write `stem: {SMALL_STEM}`"
        remedy += " next to the model's name there to measure it, or train it again"
        raise InputError(f"{run / CONFIG} model.stem", None, remedy)
    return config


def _lacks_stem(values: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether loading these values added a stem with which the run was not trained."""
    return "stem" in config.model.params and "stem" not in values["model"]


def require_trained(run: Path) -> TrainConfig:
    """Load the settings of a run, of which all seeds must be trained.

    Raises:
        InputError: the folder is missing or is not a run folder, or a seed is not trained.
    """
    if not run.is_dir():
        raise InputError("run", run, "there is no such folder; name the folder of a trained run")
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
    """Whether this is the folder of a training run; folders of models have a config.json, too."""
    try:
        return {"seeds", "real", "loss"} <= set(read_json(folder / CONFIG))
    except (OSError, ValueError, TypeError):
        return False


def read_data(run: Path) -> DataRecord:
    """Read `data.json`. Raises InputError if it is damaged or missing."""
    path = run / DATA
    if not path.is_file():
        raise InputError("run", path, "is missing; name a run whose training has begun")
    with report_damage(path):
        record: DataRecord = read_json(path)
        if not isinstance(record["real"], str):
            raise TypeError("real is not a digest")
    return record


def pin_data(data: DataRecord, run: Path) -> None:
    """Write `data.json`; if seeds have begun, compare with it instead.

    Raises:
        InputError: seeds have begun on other data.
    """
    path = run / DATA
    if path.is_file() and _has_begun_seeds(run):
        pinned = read_json(path)
        if pinned != data:
            field = next(key for key, value in data.items() if pinned.get(key) != value)
            raise InputError(f"{path} {field}", pinned.get(field), OTHER_DATA_REMEDY)
    else:
        write_json(path, data)


@dataclass(frozen=True)
class MixedPin:
    """What a run keeps of a mixed dataset that may have grown since the run began.

    Attributes:
        index: name of the index, so that the run ignores newer ones.
        flags: number of files of flags; None if the run's exclusion reads none.
    """

    index: str | None = None
    flags: int | None = None


def mixed_pin(run: Path) -> MixedPin:
    """The index and flags of the mixed dataset that this run began with."""
    data = begun_data(run)
    if data is None or data["mixed"] is None:
        return MixedPin()
    return MixedPin(data["mixed"]["index"], data["mixed"].get("flags"))


def begun_data(run: Path) -> DataRecord | None:
    """The data that the run's seeds began with; None if none has begun."""
    return read_data(run) if (run / DATA).is_file() and _has_begun_seeds(run) else None


def is_measured(config: TrainConfig, run: Path) -> bool:
    """Whether evaluation.json has exactly these seeds, trained and measured with these settings."""
    if not ((run / EVALUATION).is_file() and (run / CONFIG).is_file()):
        return False
    values, evaluation = read_json(run / CONFIG), read_json(run / EVALUATION)
    stored = TrainConfig.model_validate(values)
    if _lacks_stem(values, stored):
        return False
    seeds = {row["seed"] for row in evaluation["rows"]} - {None}
    same_training = stored.identity() == config.identity() and seeds == set(config.seeds)
    return same_training and has_evaluation_settings(config, evaluation)


def has_evaluation_settings(config: TrainConfig, evaluation: Mapping[str, object]) -> bool:
    """Whether the evaluation of a run or seed was measured with the current evaluation settings.

    These settings are not part of a run's identity: it can be measured again without training.
    """
    same_schema = evaluation.get("schema") == SCHEMA
    return same_schema and evaluation_settings(evaluation) == config.evaluation


def evaluation_settings(evaluation: Mapping[str, object]) -> EvaluationConfig | None:
    """The settings of an evaluation, where new settings have their defaults; None if damaged."""
    try:
        return EvaluationConfig.model_validate(evaluation.get("evaluation"))
    except ValidationError:
        return None


def stale_evaluations(config: TrainConfig, run: Path) -> list[int]:
    """Seeds measured with other settings; none until all seeds of the run are measured."""
    evaluations = {seed: read_seed_evaluation(run, seed) for seed in config.seeds}
    done = {seed: evaluation for seed, evaluation in evaluations.items() if evaluation is not None}
    if len(done) < len(evaluations):
        return []
    return [
        seed for seed, evaluation in done.items() if not has_evaluation_settings(config, evaluation)
    ]


def run_digest(config: TrainConfig, data: DataRecord) -> str:
    """Digest of settings and data; a seed and this digest determine the trained weights."""
    return fingerprint({"config": config.identity(), "data": dict(data)})


def check_stored_settings(
    stored: Mapping[str, object], requested: Mapping[str, object], run: Path
) -> None:
    """Raise InputError, which names them, if settings that training depends on differ."""
    old, new = flat(_identity(stored)), flat(_identity(requested))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if changed:
        names = dict.fromkeys(whole_section(name, old, new) for name in changed)
        changes = [f"{n}: {in_words(old, n)} there, {in_words(new, n)} now" for n in names]
        if len(changes) > MAX_NAMED_SETTINGS:
            changes[MAX_NAMED_SETTINGS:] = [f"and {len(changes) - MAX_NAMED_SETTINGS} more"]
        remedy = f"was begun with other settings ({'; '.join(changes)}); choose a fresh run folder"
        raise InputError("run", run, f"{remedy} or restore them")


def _has_begun_seeds(run: Path) -> bool:
    return any(run.glob("seed-*"))


def _identity(
    settings: Mapping[str, object], excluded: SettingNames = NON_IDENTITY_SETTINGS
) -> dict[str, object]:
    """As `TrainConfig.identity`, of stored settings that another version may have written."""
    identity = {name: value for name, value in settings.items() if excluded.get(name) is not True}
    for name, inner in excluded.items():
        section = identity.get(name)
        if isinstance(inner, Mapping) and isinstance(section, Mapping):
            identity[name] = _identity(section, inner)
    return identity


LOCK = ".lock"
# A trainer whose flow was killed gets two minutes to write its checkpoint.
LOCK_TIMEOUT_S = 150.0
LOCK_POLL_S = 0.2


@contextmanager
def seed_lock(folder: Path, *, label: str, stop: ShouldStop = never) -> Iterator[None]:
    """Hold the lock of a seed's folder; the kernel releases it when this process ends.

    Args:
        label: the beginning of the line that is printed while waiting.
    Raises:
        InputError: another training holds the lock, and does not end in LOCK_TIMEOUT_S.
        Interrupted: `stop` returned true before the lock was acquired.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            _acquire(file, folder, label=label, stop=stop)
        except OSError as error:  # some network file systems have no locks
            text = f"{label}: {folder} cannot be locked ({error.strerror}); let no other "
            print_line(f"{text}training work in it at the same time")
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
            raise Interrupted(f"{label}: stopped before it began")
        if time.monotonic() > deadline:
            remedy = f"another training works in {folder.name}; wait for its end, or stop it"
            raise InputError("run", folder.parent, remedy)
        if not announced:
            print_line(f"{label}: waiting for another training in {folder} to end")
            announced = True
        time.sleep(LOCK_POLL_S)
