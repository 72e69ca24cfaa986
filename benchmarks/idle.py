"""Roots of many small shards, and flows whose workers do nothing but their loop."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from semix.data.formats import PLAN, PROTOTYPES
from semix.data.root import Root

T = TypeVar("T")

MODULE, SLEEP_VARIABLE = "benchmarks.idle_worker", "SEMIX_IDLE_SECONDS"


def idle_root(shards: int) -> Root:
    """A root planned for `shards` of one series of two images each; its prototypes are measured."""
    return planned_root(
        "mixing.pairs={kind: named, names: [[zero, one]]}",
        f"mixing.groups_per_pair={shards}",
        "mixing.alphas=2",
        "shards.groups_per_shard=1",
        "shards.groups_per_batch=1",
    )


def planned_root(*overrides: str) -> Root:
    """A root of the quickstart's config, without shards; its prototypes are measured."""
    from benchmarks.models import build_config  # heavy, and not needed by processes that only watch
    from semix.pipeline.prototypes import prepare
    from semix.pipeline.root import create_build

    build = create_build(build_config(*overrides), tempfile.mkdtemp(prefix="semix-bench-"))
    prepare(build, device="cpu")
    return build.root


def copy_plan(root: Root) -> Root:
    """The same plan in a new folder, with none of its shards."""
    folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))
    for name in (PLAN, PROTOTYPES):
        shutil.copy(Path(root.url, name), folder / name)
    return Root(str(folder))


@contextmanager
def idle_workers(seconds: float = 0.0) -> Iterator[None]:
    """Within the block, flows of this process start workers whose models cost nothing.

    Args:
        seconds: time that each shard sleeps.
    """
    from semix.flows.slots import slot

    # The working folder is not on a worker's import path.
    variables = {SLEEP_VARIABLE: str(seconds), "PYTHONPATH": str(Path(__file__).parents[1])}
    with patch.object(slot, "WORKER", MODULE), patch.dict(os.environ, variables):
        yield


@contextmanager
def own_prefect() -> Iterator[Path]:
    """Yields a separate Prefect home, which processes started in the block use."""
    saved = {name: os.environ.pop(name, None) for name in ("PREFECT_HOME", "PREFECT_API_URL")}
    with tempfile.TemporaryDirectory(prefix="semix-prefect-", ignore_cleanup_errors=True) as home:
        os.environ["PREFECT_HOME"] = home
        try:
            yield Path(home)
        finally:
            del os.environ["PREFECT_HOME"]
            os.environ.update({name: value for name, value in saved.items() if value is not None})


def call_in_new_process(function: Callable[[], T]) -> T:
    """Call a function in a new process with a separate Prefect home; returns its result."""
    with own_prefect(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function).result()
