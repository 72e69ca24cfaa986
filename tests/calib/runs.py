"""Helpers for tests of whole runs: history, comparison, interruption, several processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS = 3  # per epoch of either stage: 60 images in batches of 20
WEIGHTS = ("model.safetensors", "head.safetensors", "logits-base.safetensors")


def history(run: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of history.jsonl without their times."""
    text = (run / f"seed-{seed}" / "history.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


def assert_same_results(
    run: Path, reference: Path, seed: int = 0, *, weights: Sequence[str] = WEIGHTS
) -> None:
    for name in weights:
        states = [load_file(folder / f"seed-{seed}" / name) for folder in (run, reference)]
        torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert history(run, seed) == history(reference, seed)


def stop_after(epochs: int = 0, *, steps: int = 0) -> Callable[[], bool]:
    """A stop condition that is called once per step of both stages and is true after these."""
    last, calls = epochs * STEPS + steps, iter(range(1, 1000))
    return lambda: next(calls) == last


def run_two(script: str, folder: Path, *arguments: object, processes: int = 2) -> str:
    """Run a script in two processes or more; returns what they print."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command.append(f"--nproc_per_node={processes}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    result = subprocess.run(
        [*command, str(folder / "script.py"), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # processes that wait for each other never end
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
