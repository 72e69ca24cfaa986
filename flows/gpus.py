"""Which GPUs this process may use, asked without importing torch."""

import os
import subprocess
from collections.abc import Mapping


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Identifiers as CUDA_VISIBLE_DEVICES takes them; empty without a GPU.

    Args:
        environment: of the process that is meant.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part for part in chosen.split(",") if part not in ("", "-1")]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return found.stdout.split() if found.returncode == 0 else []


def settled_device(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """auto is cuda for a process that has a GPU: it would go on without a lost one on the CPU."""
    return "cuda" if device == "auto" and visible_gpus(environment) else device
