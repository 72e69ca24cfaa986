"""Limits of this process's control groups, as of a container or a job: memory left, cores."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.machine import cores

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # of each hierarchy: number, controllers, our group in it


@dataclass(frozen=True)
class MemoryLimit:
    """The nearest limit of memory.

    Attributes:
        left: bytes until it is reached; files that were only read give way.
    """

    limit: int
    left: int


def memory_limit(root: Path = ROOT, own: Path = OWN) -> MemoryLimit | None:
    """Of all groups that we are in, the limit of which least is left; None without one."""
    found = []
    for folder in _groups(root, own, "memory"):
        if (limit := _number(folder, "memory.max", "memory.limit_in_bytes")) is None:
            continue
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        cached = _statistics(folder, "inactive_file", "total_inactive_file")
        found.append(MemoryLimit(limit, max(0, limit - max(0, used - cached))))
    return min(found, key=lambda one: one.left, default=None)


def usable_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """Cores that this process may run on, at most as many as its groups may keep busy."""
    quotas = [quota for folder in _groups(root, own, "cpu") if (quota := _cpu_quota(folder))]
    return max(1, int(min([cores(), *quotas])))


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Folders of our groups, the innermost first; within a container some are not to be seen."""
    if not own.is_file():  # macOS
        return
    for line in own.read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / controller if names else root  # version 1 has a tree for each controller
        for parts in range(len(Path(path).parts), 0, -1):
            yield base.joinpath(*Path(path).parts[1:parts])


def _cpu_quota(folder: Path) -> float | None:
    """Cores that a group may keep busy; None for any number."""
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _number(folder, "cpu.cfs_quota_us")
    period_us = _number(folder, "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(folder: Path, *names: str) -> int | None:
    """From the first file that is there; None where there is none or no limit."""
    for name in names:
        if (folder / name).is_file():
            text = (folder / name).read_text().strip()
            return None if text == "max" else int(text)
    return None


def _statistics(folder: Path, *names: str) -> int:
    """The last of these entries that memory.stat has; 0 without any."""
    path, found = folder / "memory.stat", 0
    for line in path.read_text().splitlines() if path.is_file() else ():
        name, _, value = line.partition(" ")
        found = int(value) if name in names else found
    return found
