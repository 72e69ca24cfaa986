"""Which processes on which machines train one model together."""

from dataclasses import dataclass
from typing import Literal

from data.errors import InputError
from flows.gpus import visible_gpus

Device = Literal["auto", "cpu", "cuda"]

MOST_RESTARTS = 100  # of a trainer; one that is lost so often will be lost again


@dataclass(frozen=True)
class Machines:
    """This machine's part in a training; the others have a launch of their own.

    Attributes:
        processes: over all machines.
        count, rank: how many machines, and which of them this is; 0 is the main one.
        main_process: HOST:PORT where the main machine can be reached by the others.
        device: auto, cpu or cuda.
    """

    processes: int = 1
    count: int = 1
    rank: int = 0
    main_process: str = ""
    device: Device = "auto"

    @property
    def here(self) -> int:
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


def check_machines(machines: Machines) -> None:
    """Find what the processes would refuse, or wait for in vain.

    Raises:
        InputError: numbers that do not go together, no address, a device that is not there, more
            processes than this machine has GPUs, or a driver that does not work.
    """
    count, processes = machines.count, machines.processes
    if processes < count or processes % count:
        remedy = f"{count} machines share them equally; choose a multiple of {count}"
        raise InputError("processes", processes, remedy)
    if not 0 <= machines.rank < count:
        remedy = f"choose 0 to {count - 1}, another one on each machine; there are {count}"
        raise InputError("machine_rank", machines.rank, remedy)
    if count > 1:
        machines.address()
    elif machines.main_process:
        remedy = "is for several machines; say how many with machines, or leave it out"
        raise InputError("main_process", machines.main_process, remedy)
    _check_device(machines)


def _check_device(machines: Machines) -> None:
    gpus = [] if machines.device == "cpu" else visible_gpus()
    if machines.device == "cuda" and not gpus:
        remedy = "no GPU is visible here; choose auto or cpu, or another machine"
        raise InputError("device", "cuda", remedy)
    if gpus and machines.here > len(gpus):
        remedy = f"one a GPU, and {len(gpus)} are visible; choose fewer"
        raise InputError("processes", machines.here, remedy)
