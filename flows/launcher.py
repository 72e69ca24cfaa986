"""How the trainer is launched: the command, accelerate's settings, the trainer's last word."""

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.config import TrainConfig
from flows.cgroup import usable_cores
from flows.child import python_module
from flows.gpus import CHOSEN
from flows.machines import Machines
from flows.supervise import Outcome

GRACE_S = 120.0  # after SIGTERM the trainer ends its step and writes a checkpoint
ENDING_S = 10.0  # of that, for torchrun to end processes that did not follow
# How the trainer begins its last word, the most telling first.
REFUSAL, DIVERGENCE, CRASH, INTERRUPTION = "error: ", "diverged: ", "crashed: ", "interrupted: "
WORDS = (REFUSAL, DIVERGENCE, CRASH, INTERRUPTION)
# As torchrun puts it; others that it ended, or that missed this one, have words of their own.
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
SILENCE = "it gave no reason: a process that was killed, most often for want of memory, has none"
ALONE = Machines()


def launch_command(launcher: Path, trainer: Sequence[str], *, num_processes: int) -> list[str]:
    """`accelerate launch -m calib.train ...`, by the module behind that command.

    The `accelerate` program imports every subcommand first: 12 s on two cores against 4 s.

    Args:
        launcher: file of `launcher_settings`.
        trainer: arguments of calib.train.
        num_processes: on this machine, to share its cores.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // num_processes))
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
        found[CHOSEN] = ""
    return found


def last_word(line: str) -> list[str]:
    """What the line says, if it says why a training ends."""
    if found := KILLED.search(line):
        name = signal.strsignal(int(found[1]))
        return [f"process {found[2]} of this machine died of signal {found[1]} ({name})"]
    return [line] if line.startswith(WORDS) else []


def most_telling(words: Sequence[str]) -> str:
    """Of all last words of one training, that which says why it ended; empty if none does.

    Of several processes the first that ends makes the others fail.
    """
    for prefix in (REFUSAL, DIVERGENCE):
        if found := [word for word in words if word.startswith(prefix)]:
            return found[-1]
    killed = [word for word in words if not word.startswith(WORDS)]
    crashed = [word for word in words if word.startswith(CRASH)]
    return next(iter([*killed, *crashed, *words]), "")


def how_it_ended(outcome: Outcome, words: Sequence[str]) -> str:
    """One line on a training that gave no result: its exit status, and why."""
    word = most_telling(words)
    if not word and any(line.startswith("Traceback") for line in outcome.last_lines):
        word = outcome.last_lines[-1]
    return f"{outcome}: {word or SILENCE}"
