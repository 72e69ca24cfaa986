"""Launch a trainer: its machines, its command, its settings, and the reason why it ended."""

import json
import logging
import os
import re
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from semix.calib.run_folder import CONFIG
from semix.data.errors import InputError
from semix.data.machine import usable_cores
from semix.flows.child import ChildExit, StopSignal, python_module, sleep_until_stopped, supervise
from semix.flows.gpus import VISIBLE_DEVICES, visible_gpus

if TYPE_CHECKING:  # the command line starts without it
    from semix.calib.config import TrainConfig

Device = Literal["auto", "cpu", "cuda"]

MAX_RESTARTS = 100  # of a trainer; after so many losses it will be lost again
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0  # before a restart; each pause is twice the one before
NO_CHANGES: Mapping[str, str] = {}  # to the environment
GRACE_S = 120.0  # after SIGTERM the trainer ends its step and writes a checkpoint
ENDING_S = 10.0  # the last seconds of GRACE_S, in which torchrun kills processes
# Prefixes of the trainer's last line, the most informative first.
REFUSAL, DIVERGENCE, CRASH, INTERRUPTION = "error: ", "diverged: ", "crashed: ", "interrupted: "
REASON_PREFIXES = (REFUSAL, DIVERGENCE, CRASH, INTERRUPTION)
# torchrun's message; processes that it ended, or that waited for this one, have other messages.
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
log = logging.getLogger("semix.train")
NO_REASON = "it gave no reason: the process was probably killed, most often for lack of memory"


@dataclass(frozen=True)
class Machines:
    """The machines of a training run, as given to the launch on this one.

    Attributes:
        processes: number of processes on all machines together.
        count, rank: number of machines, and the number of this machine; 0 is the main machine.
        main_process: HOST:PORT at which the others reach the main machine.
        device: auto, cpu or cuda.
    """

    processes: int = 1
    count: int = 1
    rank: int = 0
    main_process: str = ""
    device: Device = "auto"

    @property
    def local_processes(self) -> int:
        """Processes on this machine."""
        return self.processes // self.count

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not visible_gpus())

    def address(self) -> tuple[str, int]:
        """Host and port of the main process. Raises InputError for anything else."""
        host, _, port = self.main_process.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            remedy = "give HOST:PORT of machine 0, the same on every machine, as 10.0.0.1:29500"
            raise InputError("main_process", self.main_process or "none", remedy)
        return host, int(port)


def check_restarts(restarts: int) -> None:
    """Raise InputError for a negative number of restarts, or for too many."""
    if not 0 <= restarts <= MAX_RESTARTS:
        raise InputError("restarts", restarts, f"choose 0 to {MAX_RESTARTS}")


def check_machines(machines: Machines) -> None:
    """Check what the processes would refuse, or wait for in vain.

    Raises:
        InputError: numbers that contradict each other, no address, a missing device, more
            processes than this machine has GPUs, or a driver that does not work.
    """
    count, processes = machines.count, machines.processes
    if processes < count or processes % count:
        remedy = f"{count} machines share them equally; choose a multiple of {count}"
        raise InputError("processes", processes, remedy)
    if not 0 <= machines.rank < count:
        remedy = f"choose 0 to {count - 1}, a different one on each of the {count} machines"
        raise InputError("machine_rank", machines.rank, remedy)
    if count > 1:
        machines.address()
    elif machines.main_process:
        remedy = "is for several machines; set machines, too, or leave this out"
        raise InputError("main_process", machines.main_process, remedy)
    _check_device(machines)


def _check_device(machines: Machines) -> None:
    gpus = [] if machines.device == "cpu" else visible_gpus()
    if machines.device == "cuda" and not gpus:
        remedy = "no GPU is visible here; choose auto or cpu, or another machine"
        raise InputError("device", "cuda", remedy)
    if gpus and machines.local_processes > len(gpus):
        remedy = f"one per GPU, and {len(gpus)} are visible; choose fewer"
        raise InputError("processes", machines.local_processes, remedy)


def launch_command(launcher: Path, trainer: Sequence[str], *, num_processes: int) -> list[str]:
    """The command `accelerate launch -m semix.calib.train ...`, by the module behind it.

    The `accelerate` program first imports every subcommand: 12 s on two cores against 4 s.

    Args:
        launcher: file of `launcher_settings`.
        trainer: arguments of semix.calib.train.
        num_processes: processes on this machine, which share its cores.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // num_processes))
    return python_module(
        "accelerate.commands.launch",
        f"--config_file={launcher}",
        f"--num_cpu_threads_per_process={threads}",
        "--quiet",  # else its traceback hides the trainer's
        "--module",
        # The launcher may have ended when the trainer, in another group, must be ended.
        "semix.flows.child",
        f"--grace={GRACE_S}",
        "semix.calib.train",
        *trainer,
        grace_s=GRACE_S,
    )


def launcher_settings(config: "TrainConfig", machines: Machines) -> dict[str, Any]:
    """All settings that accelerate would otherwise ask for or take from a user's config file."""
    host, port = machines.address() if machines.count > 1 else (None, 0)  # 0: any free port
    return {
        "compute_environment": "LOCAL_MACHINE",
        # Also without GPUs: only then does accelerate start several processes by torchrun.
        "distributed_type": "MULTI_GPU" if machines.processes > 1 else "NO",
        "use_cpu": machines.on_cpu,
        "num_processes": machines.processes,
        "num_machines": machines.count,
        "machine_rank": machines.rank,
        "main_process_ip": host,
        "main_process_port": port,
        "same_network": True,  # the others reach machine 0 at that very address
        "main_training_function": "main",
        "mixed_precision": config.mixed_precision,
        "debug": False,
    }


def write_launcher(config: "TrainConfig", folder: Path, machines: Machines) -> Path:
    """Write `launcher_settings` to a file for accelerate."""
    path = folder / "accelerate.json"
    path.write_text(json.dumps(launcher_settings(config, machines)))
    return path


def trainer_environment(machines: Machines) -> dict[str, str]:
    """Changes to this process's environment for the launcher."""
    # Only torchrun knows its processes: it must end them before it is ended itself.
    changes = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(GRACE_S - ENDING_S))}
    if machines.device == "cpu":
        changes[VISIBLE_DEVICES] = ""
    return changes


def exit_reason(line: str) -> list[str]:
    """A list of the reason why a trainer ends, if this line states it; else empty."""
    if match := KILLED.search(line):
        name = signal.strsignal(int(match[1]))
        return [f"process {match[2]} of this machine died of signal {match[1]} ({name})"]
    return [line] if line.startswith(REASON_PREFIXES) else []


def most_informative_reason(reasons: Sequence[str]) -> str:
    """The most informative of the reasons that one training run gave; empty if there are none.

    The first process that ends makes the other processes fail.
    """
    for prefix in (REFUSAL, DIVERGENCE):
        if matching := [reason for reason in reasons if reason.startswith(prefix)]:
            return matching[-1]
    kills = [reason for reason in reasons if not reason.startswith(REASON_PREFIXES)]
    crashes = [reason for reason in reasons if reason.startswith(CRASH)]
    return next(iter([*kills, *crashes, *reasons]), "")


def describe_exit(outcome: ChildExit, reasons: Sequence[str]) -> str:
    """One line on a failed training run: its exit status and the reason."""
    reason = most_informative_reason(reasons)
    if not reason and any(line.startswith("Traceback") for line in outcome.last_lines):
        reason = outcome.last_lines[-1]
    return f"{outcome.how}: {reason or NO_REASON}"


@dataclass(frozen=True)
class TrainerExit:
    """How a trainer ended.

    Attributes:
        reasons: that its processes gave; accelerate turns every exit status into 1, and with
            several processes adds a long report.
    """

    outcome: ChildExit
    reasons: Sequence[str]

    @property
    def reason(self) -> str:
        return most_informative_reason(self.reasons)

    @property
    def is_lost(self) -> bool:
        """Whether it was killed or crashed, so that starting it again may help.

        If semix itself is stopped, nobody asks, so an interruption counts as a loss, too. No other
        trainer may run beside one that cannot be ended.
        """
        final = self.outcome.stuck or self.reason.startswith((REFUSAL, DIVERGENCE))
        return self.outcome.returncode != 0 and not final

    def __str__(self) -> str:
        """Why it failed, in one line."""
        if self.reason.startswith((REFUSAL, DIVERGENCE)):
            return self.reason.removeprefix(REFUSAL)
        return describe_exit(self.outcome, self.reasons)


def run_trainer(
    config: "TrainConfig",
    run: Path,
    machines: Machines,
    *,
    on_line: Callable[[str], None],
    seeds: Sequence[int] = (),
    trainers: int = 1,
    environment: Mapping[str, str] = NO_CHANGES,
    restarts: int = 0,
    stop: StopSignal | None = None,
) -> TrainerExit:
    """Run the trainer of a run folder to its end, and again from its last checkpoint if it is lost.

    Args:
        config: the settings in the run folder.
        on_line: called with every line of the trainer, which writes one per epoch.
        seeds: only these seeds of the run; all by default.
        trainers: number of trainers that share this machine's cores.
        environment: further changes to this process's environment.
        restarts: how often a lost trainer is started again, after growing pauses.
        stop: ends the trainer, which writes a checkpoint first, or the pause.
    """
    arguments = ["--config", str(run / CONFIG), f"--device={machines.device}"]
    arguments += [f"--seeds={','.join(map(str, seeds))}"] if seeds else []
    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        launcher = write_launcher(config, Path(folder), machines)
        command = launch_command(
            launcher, arguments, num_processes=trainers * machines.local_processes
        )
        changes = {**trainer_environment(machines), **environment}
        for pause_s in [*pauses(restarts), None]:
            ended = follow_trainer(command, on_line=on_line, environment=changes, stop=stop)
            if pause_s is None or not ended.is_lost or (stop and stop.is_set()):
                break
            log.warning("%s; started again in %.0f s, from the last checkpoint", ended, pause_s)
            sleep_until_stopped(pause_s, stop)
            if stop and stop.is_set():
                break
    return ended


def follow_trainer(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    environment: Mapping[str, str] = NO_CHANGES,
    stop: StopSignal | None = None,
) -> TrainerExit:
    """Run one trainer to its end, or until `stop` is set."""
    reasons: list[str] = []

    def note(line: str) -> None:
        reasons.extend(exit_reason(line))
        on_line(line)

    outcome = supervise(command, on_line=note, environment=environment, stop=stop, grace_s=GRACE_S)
    return TrainerExit(outcome, reasons)


def pauses(restarts: int) -> list[float]:
    """Seconds before each restart."""
    return [min(FIRST_PAUSE_S * 2**number, MAX_PAUSE_S) for number in range(restarts)]
