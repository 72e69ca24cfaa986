"""Helpers for tests of whole runs: history, comparison, interruption, several processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    """Run a script in two processes or more, as a launcher does; returns what they print."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, str(folder / "script.py"), *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    logs = [(folder / f"process-{rank}").open("w+") for rank in range(processes)]
    started = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, log in enumerate(logs)
    ]
    with ThreadPoolExecutor(processes) as pool:
        errors = list(pool.map(partial(_errors_of, others=started), started))
    assert not any(process.returncode for process in started), "\n".join(errors)
    for log in logs:
        log.seek(0)
    return "".join(log.read() for log in logs)


def _errors_of(process: "subprocess.Popen[str]", others: Sequence["subprocess.Popen[str]"]) -> str:
    """What a process wrote to stderr; where it fails, the others, which wait for it, are ended."""
    try:
        errors = process.communicate(timeout=300)[1]
    finally:
        if process.returncode != 0:
            for other in others:
                other.kill()
    return errors


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
