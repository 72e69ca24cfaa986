"""The files of a run, and who may write them."""

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, get_args

from semix.calib.config import OUTSIDE_IDENTITY, SMALL_STEM, Outside, TrainConfig
from semix.calib.stopping import Interrupted, ShouldStop, never
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.fingerprint import fingerprint
from semix.data.printable import print_line
from semix.data.settings import flat, in_words, load_settings, whole_section
from semix.data.store import Store
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

CONFIG = "config.json"
DATA = "data.json"
EVALUATION = "evaluation.json"
MODEL, HEAD = "model.safetensors", "head.safetensors"  # of a seed: what each stage trained
LINEAGE = "lineage.json"  # of a run with mixed images: `semix.data.lineage.Lineage`
HISTORY = "history.jsonl"  # of a seed: a line an epoch, over its stages
SCHEMA = 3  # of evaluation.json
StageName = Literal["base", "head"]  # as files and rows are named after it
SHOWN = 5  # settings named in one message
SECOND_RUN = "is not what this run began with; choose a fresh run folder or restore the setting"


class MixedRecord(TypedDict):
    """Of data.json: the mixed dataset as it was opened."""

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
    weights: NotRequired[str]  # where the network begins with pretrained ones


# evaluation.json, of a run and of each seed

# As trained, then each of: one temperature, an ensemble of that with what it was and with chance,
# a scale and shift a class, the same held near one temperature, a matrix held so, a rising map a
# class.
Kind = Literal["plain", "scaled", "ets", "vector", "svs", "sms", "isotonic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Intervals = dict[str, list[float]]  # by measure, both limits


class Shift(TypedDict):
    """Corrupted test images; measures after temperature scaling begin with `scaled_`."""

    bins: int
    images: int
    mean: dict[str, float]
    corruptions: dict[str, dict[str, dict[str, float]]]  # by name; by severity, and their mean


class Measures(TypedDict):
    """Of the test images, by kind."""

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
    conformal: dict[str, dict[str, float]]  # by score, of the scaled logits
    intervals: NotRequired[Intervals]  # of the plain ones
    posthoc_intervals: NotRequired[dict[str, Intervals]]  # of the others, by kind
    drawn: NotRequired[
        dict[str, dict[str, list[float]]]
    ]  # by kind and measure: `semix.calib.replicates`


class Row(Measures):
    """One stage of one seed."""

    stage: StageName
    seed: int
    logits: str  # a path below the run
    source: str  # digest of what they come from
    shift: NotRequired[Shift]
    ood: NotRequired[dict[str, dict[str, float]]]  # by dataset, and their mean


class SeedEvaluation(TypedDict):
    """Of a seed: what it was trained and measured under, and its stages."""

    schema: int
    config: dict[str, object]
    evaluation: dict[str, object]
    digest: str
    training_seconds: float
    seconds: float  # of training and of this measuring
    rows: list[Row]


class Evaluation(TypedDict):
    """Of a run: the rows of all seeds.

    Attributes:
        warnings: what to look at before the figures are believed, each with what to change.
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
    """Around what reads a file of a run, which may come from elsewhere.

    Raises:
        InputError: it is damaged, or not what such a file holds; names it.
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
    """Written last for a seed: where it is, the seed is done."""
    return seed_folder(run, seed) / EVALUATION


def evaluation_beside(run: Path, config: TrainConfig) -> Path:
    """Where a run is measured under other settings than its own: `evaluation-1a2b3c4d.json`."""
    name, suffix = EVALUATION.split(".")
    digest = fingerprint(config.evaluation.model_dump(mode="json"))
    return run / f"{name}-{digest[:8]}.{suffix}"


def measured_seed(run: Path, seed: int) -> SeedEvaluation | None:
    """What was measured of a seed; None if it is not done."""
    path = seed_evaluation(run, seed)
    found: SeedEvaluation | None = read_json(path) if path.is_file() else None
    return found


def claim_run(config: TrainConfig, run: Path) -> Path:
    """Write the resolved settings to `config.json`, the file that `semix.calib.train` reads.

    A run's folder in which no seed was begun takes any settings.

    Returns:
        The path of config.json.
    Raises:
        InputError: seeds were begun under other settings; names the settings that differ. Or the
            folder holds something else.
    """
    refuse_other_run(config, run)
    path = run / CONFIG
    write_json(path, config.model_dump(mode="json"))
    return path


def refuse_other_run(config: TrainConfig, run: Path) -> None:
    """Raises InputError as `claim_run`, and writes nothing."""
    path = run / CONFIG
    if not is_run(run):
        Store(str(run)).refuse_strangers("training run")
    if path.is_file() and _begun(run):
        refuse_differing(read_json(path), config.model_dump(mode="json"), run)


def stored_settings(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of a run folder's `config.json`.

    Raises:
        InputError: they cannot be read, or they mean another network today than the one that was
            trained: before the ImageNet stem was there, large images had the small one.
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
    """Whether reading the settings of a run has added a stem that it was not trained with."""
    return "stem" in config.model.params and "stem" not in values["model"]


def trained_run(run: Path) -> TrainConfig:
    """The settings of a run of which all seeds are trained.

    Raises:
        InputError: no such folder, none of a run, or a run that is not finished.
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
    """Whether a training run was begun here; folders of models have a config.json, too."""
    try:
        return {"seeds", "real", "loss"} <= set(read_json(folder / CONFIG))
    except (OSError, ValueError, TypeError):
        return False


def read_data(run: Path) -> DataRecord:
    """What `pin_data` wrote. Raises InputError if it is damaged, or not there."""
    path = run / DATA
    if not path.is_file():
        raise InputError("run", path, "is not there; name a run whose training was begun")
    with damage_of(path):
        found: DataRecord = read_json(path)
        if not isinstance(found["real"], str):
            raise TypeError("real is no digest")
    return found


def pin_data(data: DataRecord, run: Path) -> None:
    """Write or compare `data.json`: digests of the real data and of the pinned mixed index.

    Raises:
        InputError: seeds were begun on other data.
    """
    path = run / DATA
    if path.is_file() and _begun(run):
        found = read_json(path)
        if found != data:
            field = next(key for key, value in data.items() if found.get(key) != value)
            raise InputError(f"{path} {field}", found.get(field), SECOND_RUN)
    else:
        write_json(path, data)


def pinned_index(run: Path) -> str | None:
    """The mixed index that this run began with, so that going on ignores newer ones."""
    mixed = read_data(run)["mixed"] if (run / DATA).is_file() and _begun(run) else None
    return None if mixed is None else mixed["index"]


def is_measured(config: TrainConfig, run: Path) -> bool:
    """Whether `evaluation.json` holds exactly these seeds, trained and measured as set."""
    if not ((run / EVALUATION).is_file() and (run / CONFIG).is_file()):
        return False
    values, found = read_json(run / CONFIG), read_json(run / EVALUATION)
    begun = TrainConfig.model_validate(values)
    if _lacks_stem(values, begun):
        return False
    seeds = {row["seed"] for row in found["rows"]}
    as_trained = begun.identity() == config.identity() and seeds == set(config.seeds)
    return as_trained and measured_as(config, found)


def measured_as(config: TrainConfig, found: Mapping[str, object]) -> bool:
    """Whether an evaluation.json, of a run or a seed, was measured under these settings.

    They are outside the identity of a run: others measure it anew without training.
    """
    settings = config.evaluation.model_dump(mode="json")
    return found.get("schema") == SCHEMA and found.get("evaluation") == settings


def stale_evaluations(config: TrainConfig, run: Path) -> list[int]:
    """Seeds of a run of which all are measured, but these under other settings."""
    found = {seed: measured_seed(run, seed) for seed in config.seeds}
    done = {seed: evaluation for seed, evaluation in found.items() if evaluation is not None}
    if len(done) < len(found):
        return []
    return [seed for seed, evaluation in done.items() if not measured_as(config, evaluation)]


def run_digest(config: TrainConfig, data: DataRecord) -> str:
    """Digest of settings and data: equal digests and seeds train equal models."""
    return fingerprint({"config": config.identity(), "data": dict(data)})


def refuse_differing(
    found: Mapping[str, object], wanted: Mapping[str, object], place: Path
) -> None:
    """Raises InputError for the settings that differ, of those that training depends on."""
    old, new = flat(_identity(found)), flat(_identity(wanted))
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if differing:
        names = dict.fromkeys(whole_section(name, old, new) for name in differing)
        shown = [f"{n}: {in_words(old, n)} there, {in_words(new, n)} now" for n in names]
        if len(shown) > SHOWN:
            shown[SHOWN:] = [f"and {len(shown) - SHOWN} more"]
        remedy = f"was begun with other settings ({'; '.join(shown)}); choose a fresh run folder"
        raise InputError("run", place, f"{remedy} or restore them")


def _begun(run: Path) -> bool:
    return any(run.glob("seed-*"))


def _identity(
    settings: Mapping[str, object], outside: Outside = OUTSIDE_IDENTITY
) -> dict[str, object]:
    """As `TrainConfig.identity`, of settings that another version may have written."""
    found = {name: value for name, value in settings.items() if outside.get(name) is not True}
    for name, within in outside.items():
        below = found.get(name)
        if isinstance(within, Mapping) and isinstance(below, Mapping):
            found[name] = _identity(below, within)
    return found


LOCK = ".lock"
# An earlier trainer whose flow was killed is given two minutes for its checkpoint.
LOCK_TIMEOUT_S = 150.0
LOCK_POLL_S = 0.2


@contextmanager
def seed_lock(folder: Path, *, label: str, stop: ShouldStop = never) -> Iterator[None]:
    """Hold the lock of a seed's folder; the kernel lets it go however this process ends.

    Args:
        label: begins the line that says what is waited for.
    Raises:
        InputError: another training holds it and does not end.
        Interrupted: `stop` said so before we had it.
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
    deadline, told = time.monotonic() + LOCK_TIMEOUT_S, False
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
        if not told:
            print_line(f"{label}: waiting for another training in {folder} to end")
            told = True
        time.sleep(LOCK_POLL_S)
