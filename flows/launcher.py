"""How the trainer is launched: the command, accelerate's settings, the trainer's last word."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.config import TrainConfig
from flows.child import python_module
from flows.machines import Machines

GRACE_S = 120.0  # after SIGTERM the trainer ends its step and writes a checkpoint
ENDING_S = 10.0  # of that, for torchrun to end processes that did not follow
# How the trainer begins its last word.
REFUSAL, DIVERGENCE, INTERRUPTION = "error: ", "diverged: ", "interrupted: "
ALONE = Machines()


def launch_command(launcher: Path, trainer: Sequence[str], *, num_processes: int) -> list[str]:
    """`accelerate launch -m calib.train ...`, by the module behind that command.

    The `accelerate` program imports every subcommand first: 12 s on two cores against 4 s.

    Args:
        launcher: file of `launcher_settings`.
        trainer: arguments of calib.train.
        num_processes: on this machine, to share its cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (cores or 1) // num_processes))
    return python_module(
        "accelerate.commands.launch",
        f"--config_file={launcher}",
        f"--num_cpu_threads_per_process={threads}",
        "--quiet",  # else its own traceback hides the trainer's
        "--module",
        # The launcher may be gone when the trainer, in a group of its own, must be ended.
        "flows.child",
        f"--grace={GRACE_S}",
        "calib.train",
        *trainer,
        grace_s=GRACE_S,
    )


def launcher_settings(
    config: TrainConfig, num_processes: int, machines: Machines = ALONE
) -> dict[str, Any]:
    """All that accelerate would otherwise ask, warn about, or take from a user's own default.

    Args:
        num_processes: over all machines.
    """
    host, port = machines.address() if machines.count > 1 else (None, 0)  # 0 is any free one
    return {
        "compute_environment": "LOCAL_MACHINE",
        # Also without GPUs: it then starts processes by torchrun all the same.
        "distributed_type": "MULTI_GPU" if num_processes > 1 else "NO",
        "use_cpu": machines.on_cpu,
        "num_processes": num_processes,
        "num_machines": machines.count,
        "machine_rank": machines.rank,
        "main_process_ip": host,
        "main_process_port": port,
        "same_network": True,  # machine 0 is at that address itself
        "main_training_function": "main",
        "mixed_precision": config.mixed_precision,
        "debug": False,
    }


def write_launcher(config: TrainConfig, folder: Path, machines: Machines) -> Path:
    """A file of `launcher_settings` for accelerate."""
    path = folder / "accelerate.json"
    path.write_text(json.dumps(launcher_settings(config, machines.processes, machines)))
    return path


def trainer_environment(machines: Machines) -> dict[str, str]:
    """Changes to our environment."""
    # torchrun alone knows of its processes: it must have ended them before it is ended itself.
    found = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(GRACE_S - ENDING_S))}
    if machines.device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def last_word(line: str) -> list[str]:
    """The line, if the trainer says with it why it ends."""
    return [line] if line.startswith((REFUSAL, DIVERGENCE, INTERRUPTION)) else []
