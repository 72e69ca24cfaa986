"""What tests of whole runs share: their history, comparisons, interruptions, two processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS = 3  # of an epoch, in either stage: 60 images by 20
WEIGHTS = ("model.safetensors", "head.safetensors", "logits-base.safetensors")


def history(run: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of history.jsonl without their times."""
    text = (run / f"seed-{seed}" / "history.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


def assert_same_results(
    run: Path, other: Path, seed: int = 0, *, weights: Sequence[str] = WEIGHTS
) -> None:
    for name in weights:
        found = [load_file(folder / f"seed-{seed}" / name) for folder in (run, other)]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert history(run, seed) == history(other, seed)


def stop_after(epochs: int = 0, *, steps: int = 0) -> Callable[[], bool]:
    """Asked once a step, over both stages."""
    last, calls = epochs * STEPS + steps, iter(range(1, 1000))
    return lambda: next(calls) == last


def run_two(script: str, folder: Path, *arguments: object, processes: int = 2) -> str:
    """What a script prints that two processes run, or more."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command.append(f"--nproc_per_node={processes}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    found = subprocess.run(
        [*command, str(folder / "script.py"), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # processes that wait for each other never end
    )
    assert found.returncode == 0, found.stderr
    return found.stdout
