"""Check what a build or a training run needs, before money is spent; findings with remedies."""

import math
import os
import platform
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from semix.calib.check import check_config, check_launch
from semix.calib.config import TrainConfig
from semix.calib.features import check_memory as check_features
from semix.calib.models.complexity import complexity
from semix.calib.real_data import open_data
from semix.calib.series_choice import require_judge
from semix.data.device import multiply
from semix.data.errors import InputError
from semix.data.formats import PLAN
from semix.data.licences import licence_notes, licences
from semix.data.machine import MemoryLimit, memory_limit
from semix.data.printable import printable_line
from semix.data.real import load_real
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.flows.build_steps import decode_all_images
from semix.flows.configs import NAMES, command_of, models
from semix.flows.costs import amount, free_bytes
from semix.flows.gpus import VISIBLE_DEVICES, ask_driver, visible_gpus
from semix.flows.loop_config import LoopConfig
from semix.flows.series_by_run import series_of_config
from semix.flows.server_probe import ServerFacts, prefect_settings, probe
from semix.pipeline.checks import HUB, HUB_WEIGHTS, LOCAL, check_models, tag_repository
from semix.pipeline.config import BuildConfig, EncoderConfig
from semix.pipeline.model_paths import local_copy, quantisation
from semix.pipeline.provenance import model_cards
from semix.pipeline.root import MIXED

OK, WARNING, FAILED, UNCHECKED = "ok", "warning", "failed", "not checked"
PRECISION = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MEMORY_FACTOR = 1.5  # times the size of the weights, so that a batch of one image fits beside them
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 256e6  # bytes; batches of images pass through it, and containers get 64 MB
SLOW_S = 2.0  # for one small request to a store; a worker makes about ten per shard
LOCK_S = 2.0  # a healthy server releases its database within a tenth of this
SKEW_S = 5.0  # tolerated difference of a server's clock


@dataclass(frozen=True)
class Finding:
    """A row of the doctor's table.

    Attributes:
        state: ok, warning (a run may work), failed (a run will fail), or not checked.
        found: the result of the check.
        remedy: empty if there is nothing to do.
    """

    check: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorInput:
    """What this machine is checked for: a build, a training run or neither.

    Attributes:
        out: where the run would write; empty for none.
    """

    build: BuildConfig | None = None
    train: TrainConfig | None = None
    out: str = ""

    @property
    def real(self) -> RealDataConfig | None:
        config = self.build or self.train
        return config.real if config else None

    @property
    def dtype(self) -> str:
        """Precision of the networks."""
        if self.build:
            return self.build.generator.dtype
        return PRECISION[self.train.mixed_precision] if self.train else "float32"


def doctor_input(config: str, overrides: Sequence[str], out: str) -> DoctorInput:
    """Recognise the settings of a build, a training run or a loop by their sections.

    Raises:
        InputError: they cannot be read, or belong to none of these.
    """
    if not config:
        if overrides:
            raise InputError("--set", overrides[0], "overrides a config; give a config, too")
        return DoctorInput(out=out)
    command = command_of(config)
    if command not in ("build", "train", "loop"):
        kind = f"is {NAMES[command]}" if command else "has no sections of a config"
        remedy = f"{kind}; give that of a build, of a training run or of a loop"
        raise InputError("config", config, remedy)
    settings: Any = load_settings(models()[command], config, overrides)
    if command == "loop":
        return _loop_input(settings, out)
    return DoctorInput(out=out, **{command: settings})


def _loop_input(loop: LoopConfig, out: str) -> DoctorInput:
    """A loop's first replicate; models that it trains and images that it makes are not here yet."""
    _, _, settings = loop.replicates()[0]
    train = settings.train_config("round 0", out or "mixed").model_copy(update={"mixed": None})
    return DoctorInput(None if loop.standins else settings.build_config(), train, out)


def examine(subject: DoctorInput) -> Iterator[Finding]:
    """The findings of every check; no check leaves anything behind."""
    checks = {
        "device": check_device,
        "models": check_model_files,
        "licences": check_licences,
        "memory": check_memory,
        "pictures": check_pictures,
        "real images": check_real_images,
        "judge": check_judge,
        "training": check_training,
        "store": check_store,
        "Prefect": check_prefect,
    }
    reported: set[str] = set()
    for name, check in checks.items():
        try:
            yield from check(subject)
        except InputError as error:
            if str(error) not in reported:  # several checks read the same folder
                yield Finding(name, FAILED, error.problem, error.remedy)
            reported.add(str(error))
        except Exception as error:  # other checks still help
            reason = f"{type(error).__name__}: {error}"
            yield Finding(name, FAILED, reason, "correct this first; a run would stop here too")


def check_device(subject: DoctorInput) -> Iterator[Finding]:
    """GPUs that the driver and torch see, and whether they compute."""
    driver, fault = ask_driver("name,memory.total,driver_version")
    visible = os.environ.get(VISIBLE_DEVICES)
    hidden = visible is not None and not visible_gpus()
    if fault:
        remedy = "reload or reinstall NVIDIA's driver; or set CUDA_VISIBLE_DEVICES= for the CPU"
        yield Finding("driver", WARNING if hidden else FAILED, f"nvidia-smi: {fault}", remedy)
    else:
        yield Finding("driver", OK, "; ".join(driver) or "no NVIDIA GPU")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu_finding(index, subject.dtype)
    elif (driver or visible) and not hidden:
        remedy = "install a torch for this driver's CUDA, and check CUDA_VISIBLE_DEVICES"
        yield Finding("device", FAILED, f"torch {torch.__version__} sees no GPU", remedy)
    else:
        yield _cpu_finding(subject, hidden=bool(driver))


def _cpu_finding(subject: DoctorInput, *, hidden: bool) -> Finding:
    multiply("cpu", subject.dtype)
    result = f"CPU alone ({platform.machine()}, {torch.get_num_threads()} threads)"
    if hidden:
        result = f"{result}; CUDA_VISIBLE_DEVICES hides its GPUs"
        return Finding("device", WARNING, result, "unset it to use them")
    if subject.dtype == "float32":
        return Finding("device", OK, result)
    setting = "generator.dtype=float32" if subject.build else "mixed_precision=no"
    remedy = f"{subject.dtype} is for GPUs; use one, or --set {setting}"
    return Finding("device", WARNING, result, remedy)


def _gpu_finding(index: int, dtype: str) -> Finding:
    name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    try:
        with torch.cuda.device(index):
            if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
                remedy = "this GPU has no bfloat16; choose float16"
                return Finding("device", FAILED, f"{name}: {dtype}", remedy)
            multiply(f"cuda:{index}", dtype)
    except RuntimeError as error:
        remedy = "free or restart the GPU; install a torch for its architecture"
        return Finding("device", FAILED, f"{name}: {str(error).splitlines()[0]}", remedy)
    return Finding("device", OK, f"{name}: multiplies in {dtype}")


def check_model_files(subject: DoctorInput) -> Iterator[Finding]:
    """Models of a build: present, of the right kind, with readable headers and all weights."""
    if subject.build is None:
        yield Finding("models", UNCHECKED, "no config of a build was given")
        return
    check_models(subject.build)
    findings = [_model_finding(name, *model) for name, model in _models(subject.build).items()]
    yield from findings
    if all(finding.state != FAILED for finding in findings):
        from semix.pipeline.generators.loading import (
            check_networks,  # seconds, for those with a build
        )

        device = "cuda" if torch.cuda.is_available() else "cpu"
        check_networks(subject.build.generator, device=device)


def check_licences(subject: DoctorInput) -> Iterator[Finding]:
    """Licences that the model cards of a build state; those that are not for commercial use."""
    if subject.build is None:
        return
    models = model_cards(subject.build)
    for note in licence_notes(models):
        yield Finding("licence", WARNING, note, "read it, or take another model")
    texts = (f"{role} {licence}" for role, licence in licences(models).items())
    yield Finding("licences", OK, printable_line("; ".join(texts)))


def _models(build: BuildConfig) -> dict[str, tuple[str, Path | None]]:
    """Per setting: the model, and its file, folder or copy from the hub; None if not on disk."""
    generator = build.generator
    models = {"generator.model": (generator.model, local_copy(generator.model, generator.revision))}
    if (unet := generator.unet) is not None:
        models["generator.unet"] = (unet, local_copy(unet, generator.unet_revision))
    for field, encoder in build.annotation.encoders:
        if encoder.model.startswith((LOCAL, HUB)):
            model = encoder.model.removeprefix(LOCAL).removeprefix(HUB)
            models[f"{field}.model"] = (encoder.model, local_copy(model, encoder.revision))
        else:
            name = f"{encoder.model} {encoder.pretrained}"
            models[f"{field}.pretrained"] = (name, _clip_file(encoder))
    return models


def _clip_file(config: EncoderConfig) -> Path | None:
    """The weights: the file that `pretrained` names, or that of its tag in the hub's cache."""
    assert config.pretrained is not None  # check_models refuses None
    repository = tag_repository(config)
    if repository is None:
        return Path(config.pretrained)
    cached = try_to_load_from_cache(repository, HUB_WEIGHTS)
    return Path(cached) if isinstance(cached, str) else None


def _model_finding(name: str, model: str, weights_path: Path | None) -> Finding:
    if weights_path is None:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            remedy = "unset HF_HUB_OFFLINE, or fetch it before: hf download"
            return Finding(name, FAILED, f"{model} is not in the hub's cache", remedy)
        remedy = "the first run fetches it; `hf download` does so now"
        return Finding(name, WARNING, f"{model} is not in the hub's cache yet", remedy)
    try:
        files = list(weights(weights_path))
    except (OSError, SafetensorError) as error:
        remedy = "fetch or convert this model again; one of its files is damaged"
        return Finding(name, FAILED, f"{weights_path}: {error}", remedy)
    size = sum(path.stat().st_size for path in files)
    return Finding(name, OK, f"{weights_path}: {len(files)} files, {amount(size)}")


def weights(source: Path) -> dict[Path, int]:
    """Number of weights in each safetensors file that would be loaded.

    Raises:
        OSError, SafetensorError: a file that cannot be read.
    """
    counts = {}
    files = [source] if source.is_file() else sorted(source.rglob("*"))
    for path in (file for file in files if file.suffix == ".safetensors"):
        full_precision = path.with_name(path.name.split(".")[0] + ".safetensors")
        if path != full_precision and full_precision.exists():
            continue  # the same weights in another precision
        with safe_open(path, framework="np") as file:
            shapes = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
            counts[path] = sum(math.prod(shape) for shape in shapes)
    return counts


def check_memory(subject: DoctorInput) -> Iterator[Finding]:
    """Compare memory of the machine and of each GPU with the weights; check shared memory."""
    needed = _weight_bytes(subject)
    free, where = available_memory(memory_limit())
    yield memory_finding("memory", free, needed, where=where)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free = torch.cuda.mem_get_info(index)[0]
        yield memory_finding(f"memory of cuda:{index}", free, needed)
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        remedy = "in a container: docker run --shm-size=1g" if free < MIN_SHARED_MEMORY else ""
        state = WARNING if remedy else OK
        yield Finding("shared memory", state, f"{amount(free)} free", remedy)


def available_memory(limit: MemoryLimit | None) -> tuple[float, str]:
    """Available bytes, and a phrase: free on the machine, or left of our limit if that is less."""
    free = psutil.virtual_memory().available
    if limit is None or limit.remaining >= free:
        return free, "free"
    return limit.remaining, f"left of the limit of {amount(limit.limit)} (cgroup)"


def _weight_bytes(subject: DoctorInput) -> float | None:
    """Bytes of a build's weights in their precision at run time; None if not known."""
    if subject.build is None:
        return None
    try:
        counts = [weights(path) if path else {} for _, path in _models(subject.build).values()]
    except Exception:  # `check_model_files` reports it
        return None
    if not all(counts):  # a model that is not here yet
        return None
    return sum(
        # Quantised weights keep the size of their files.
        path.stat().st_size if quantisation(path.parent) else BYTES[subject.dtype] * count
        for files in counts
        for path, count in files.items()
    )


def memory_finding(name: str, free: float, needed: float | None, *, where: str = "free") -> Finding:
    """Compare free bytes with those of the weights."""
    result = f"{amount(free)} {where}"
    if needed is None:
        return Finding(name, OK, result)
    result = f"{result}, the weights take {amount(needed)}"
    if free < needed:
        remedy = "end other programs that use it, or choose a smaller model or a larger device"
        return Finding(name, FAILED, result, remedy)
    if free < MEMORY_FACTOR * needed:
        return Finding(name, WARNING, result, "little is left for batches; make them small")
    return Finding(name, OK, result)


def check_pictures(subject: DoctorInput) -> Iterator[Finding]:
    """Decode every image of a folder; name all that cannot be decoded."""
    if subject.real is None or subject.real.name != "imagefolder":
        return
    report = decode_all_images(subject.real)
    for note in report.notes():
        yield Finding("picture folder", WARNING, note)
    decoded = f"{report.images - len(report.bad)} of {report.images} can be decoded"
    yield Finding("pictures", OK, decoded)


def check_real_images(subject: DoctorInput) -> Iterator[Finding]:
    """Count the labelled images, by class and split."""
    if subject.real is None:
        yield Finding("real images", UNCHECKED, "no config was given")
        return
    real = load_real(subject.real)
    counts = f"{len(real.train)} to train, {len(real.test)} to test"
    yield Finding("real images", OK, f"{len(real.class_names)} classes, {counts}")


def check_judge(subject: DoctorInput) -> Iterator[Finding]:
    """Check the run whose classifiers determine pairs of classes, or choose series."""
    if subject.build is not None and (pairs := subject.build.mixing.pairs).kind == "confused":
        shared = series_of_config(subject.build, load_real(subject.build.real).class_names)
        most = max(count for _, _, count in shared.series)
        result = f"{pairs.run}, on {shared.images} images: up to {most} series for a pair"
        yield Finding("judge", OK, result)
    if subject.train is not None and (mixed := subject.train.mixed) and (choice := mixed.choose):
        names = load_real(subject.train.real).class_names
        require_judge(Path(choice.run), names, subject.train.real.image_size)
        yield Finding("judge", OK, f"{choice.run} can choose series")


def check_training(subject: DoctorInput) -> Iterator[Finding]:
    """Check all that a training run checks before its first step."""
    if (config := subject.train) is None:
        return
    check_config(config)
    check_launch(config, processes=1)
    if config.mixed is not None:  # not into memory, nor judged: both decode all images
        mixed = config.mixed.model_copy(update={"memory_gib": 0.0, "choose": None})
        config = config.model_copy(update={"mixed": mixed})
    data = open_data(config)
    check_features(config, images=len(data.real.train), num_classes=data.num_classes)
    yield Finding("training", OK, "losses, networks, real and mixed images fit together")
    network = complexity(config, data.num_classes)
    yield Finding("network", WARNING if network.remedy else OK, str(network), network.remedy)


def check_store(subject: DoctorInput) -> Iterator[Finding]:
    """Write to a store, read back, try to write twice, delete, list; and measure free space."""
    if not subject.out:
        yield Finding("store", UNCHECKED, "no path or URL was given; --out URL")
        return
    store = Store(subject.out)
    if subject.build is not None and subject.train is None:
        store.require_empty_or_own(MIXED, own=PLAN)
    store.check_writable(tidy=True)  # fails within seconds; later requests wait for recovery
    start = time.monotonic()
    store.list("doctor")
    seconds = time.monotonic() - start
    free = free_bytes(store)
    result = f"{store.url}: write, read and delete work, a listing takes {1000 * seconds:.0f} ms"
    result += f"; {amount(free)} free" if free is not None else ""
    remedy = "it is slow; use larger shards or a nearer store" if seconds > SLOW_S else ""
    yield Finding("store", WARNING if remedy else OK, result, remedy)


def check_prefect(subject: DoctorInput) -> Iterator[Finding]:
    """Check Prefect's home, and the configured server or the database of a run's own server."""
    settings = prefect_settings()
    home, url = settings.home, settings.api.url
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        yield Finding("Prefect home", OK, str(home))
    else:
        remedy = "set PREFECT_HOME to a folder that you can write"
        yield Finding("Prefect home", FAILED, f"{home} cannot be written", remedy)
    finding = server_finding(probe(url)) if url else _own_server_finding(home / "prefect.db")
    yield finding
    if url and finding.state != FAILED:
        yield from _outdated_deployments()


def _outdated_deployments() -> Iterator[Finding]:
    """A warning if deployments name entry points from before the import name `semix.flows`."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deployments = client.read_deployments()
    names = [d.name for d in deployments if (d.entrypoint or "").startswith("flows.")]
    if names:
        result = f"{', '.join(sorted(names))}: entry points of an earlier version, as flows.NAME"
        remedy = "deploy anew: prefect --no-prompt deploy --all"
        yield Finding("deployments", WARNING, result, remedy)


def server_finding(facts: ServerFacts) -> Finding:
    """Whether flows can run with the configured server."""
    if facts.reason:
        return Finding("Prefect server", FAILED, facts.url, facts.reason)
    result = f"{facts.url} runs {facts.version or 'Prefect Cloud'} and accepts our requests"
    remedy = facts.warning
    if abs(skew := facts.clock_skew_s or 0.0) > SKEW_S:
        result += f"; its clock is {skew:+,.0f} s off ours"
        remedy = remedy or "set the clocks of both machines: timedatectl set-ntp true"
    return Finding("Prefect server", WARNING if remedy else OK, result, remedy)


def _own_server_finding(database: Path) -> Finding:
    """Check the database on which every run starts its own server, as none is configured."""
    result = "PREFECT_API_URL is not set: a run starts its own"
    if not database.is_file():
        return Finding("Prefect server", OK, result)
    connection = sqlite3.connect(database, timeout=LOCK_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        remedy = "end the process that locks it, or set PREFECT_HOME to another folder"
        return Finding("Prefect server", FAILED, f"{database}: {error}", remedy)
    finally:
        connection.close()
    return Finding("Prefect server", OK, f"{result}, on {database}")
