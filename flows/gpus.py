"""Which GPUs this process may use, asked without importing torch."""

import os
import subprocess


def visible_gpus() -> list[str]:
    """Identifiers as CUDA_VISIBLE_DEVICES takes them; empty without a GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part for part in chosen.split(",") if part not in ("", "-1")]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return found.stdout.split() if found.returncode == 0 else []
