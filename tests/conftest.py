"""Fixtures of several packages: small models, roots and a Prefect server, made once per run."""

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from semix.data.real import RealDataConfig, RealDataset, load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.pipeline.config import BuildConfig
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.root import create_build
from semix.pipeline.standins import StandIns, tiny_recipe, train_standins

# The same draws every time: what fails is the change, not the draw.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

pytest_plugins = ["tests.rungs", "tests.s3", "tests.gs"]

# torch and Prefect read these once, when they are imported. Threads that spin while they wait
# would make several busy processes on two cores ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="semix-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
# Prefect resets its services in a forked child and then fails to drain them at the child's end: a
# data loader's worker would exit with 1 wherever a flow ran earlier in the same test process.
os.register_at_fork(after_in_child=threading._threading_atexits.clear)
os.environ["SEMIX_CACHE"] = tempfile.mkdtemp(prefix="semix-cache-")
atexit.register(shutil.rmtree, os.environ["SEMIX_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _logs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest see records of `semix`: an earlier command of this process may have stopped it."""
    monkeypatch.setattr(logging.getLogger("semix"), "propagate", True)


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """One real Prefect server, with a home of its own; yields its URL.

    Its key is in our settings, and in the environment of the commands that tests run.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING

    from semix.flows.run_server import prefect_server

    with prefect_server() as url, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_API_AUTH_STRING", PREFECT_API_AUTH_STRING.value())
        yield url


@pytest.fixture(scope="session")
def digits() -> RealDataset:
    return load_real(RealDataConfig(name="digits"))


Shared = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """shared(name, make): the path that `make` filled, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        path = base / "shared" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                partial = path.with_name(f"{name}.partial")
                make(partial)
                partial.rename(path)
        return path

    return make_once


@pytest.fixture(scope="session")
def hasty_standins(digits: RealDataset, shared: Shared) -> StandIns:
    """Genuine models after a few steps: right in form, worth nothing in quality."""
    recipe = tiny_recipe(image_size=32)
    folder = shared("hasty", lambda folder: train_standins(digits, folder, recipe=recipe))
    return train_standins(digits, folder, recipe=recipe)  # finds them


@pytest.fixture
def precisions() -> Iterator[set[str]]:
    """The float32 precisions (matmul, cuDNN) that were set while linear and conv layers ran."""
    from torch import nn
    from torch.backends import cuda, cudnn
    from torch.nn.modules.module import register_module_forward_hook

    precisions_seen: set[str] = set()

    def record(layer: nn.Module, *_: object) -> None:
        # Layers on the meta device only count FLOP.
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.device.type != "meta":
            precisions_seen.update((cuda.matmul.fp32_precision, cudnn.conv.fp32_precision))

    hook = register_module_forward_hook(record)
    yield precisions_seen
    hook.remove()


@pytest.fixture(scope="session")
def make_config() -> Callable[..., BuildConfig]:
    """make_config(models, *overrides): 45 series of 4 images in 8 shards, the last one short,
    in batches that need padding."""

    def make(models: StandIns, *overrides: str) -> BuildConfig:
        values = {
            "real": {"name": "digits"},
            "generator": {"model": str(models.diffusion), "steps": 3, "guidance_scale": 2.0},
            "mixing": {"groups_per_pair": 1, "alphas": 4},
            "annotation": {"model": f"local-dir:{models.clip}"},
            "shards": {"groups_per_shard": 6, "groups_per_batch": 4},
        }
        return load_settings(BuildConfig, values, overrides)

    return make


@pytest.fixture(scope="session")
def hasty_config(make_config: Callable[..., BuildConfig], hasty_standins: StandIns) -> BuildConfig:
    return make_config(hasty_standins)


@pytest.fixture(scope="session")
def built(hasty_config: BuildConfig, shared: Shared) -> Root:
    """A complete root, as a worker makes it; tests must not change it."""

    def make(folder: Path) -> None:
        from semix.pipeline.worker import main as worker

        build = create_build(hasty_config, str(folder / "mixed"))
        ensure_prototypes(build, device="cpu")
        root = build.root
        assert worker([root.url, "--device", "cpu"]) == 0
        root.write_index()

    return Root(str(shared("built", make) / "mixed"))


@pytest.fixture
def root(built: Root, tmp_path: Path) -> Root:
    """A copy of `built`, which a test may change."""
    shutil.copytree(built.url, tmp_path / "root")
    return Root(str(tmp_path / "root"))


@pytest.fixture(scope="session")
def other_clip(hasty_standins: StandIns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another CLIP: the same architecture, other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("clip") / "other"
    shutil.copytree(hasty_standins.clip, folder)
    file = folder / "open_clip_model.safetensors"
    weights = load_file(file)
    width = weights["visual.proj"].shape[1]
    weights["visual.proj"] = weights["visual.proj"] * torch.linspace(0.2, 3, width)
    save_file(weights, file)
    return folder
