"""This machine: who counts as one, its limits, its cores, the precision of its devices."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from semix.data.device import float32_precision, resolve_dtype
from semix.data.errors import InputError
from semix.data.machine import MemoryLimit, machine, memory_limit, usable_cores

SCRIPT = "from semix.data.machine import machine; print(machine())"
GB = 10**9


@pytest.mark.process
def test_processes_that_see_each_other_are_of_one_machine():
    command = [sys.executable, "-c", SCRIPT]
    assert subprocess.check_output(command, text=True).strip() == machine()


def test_it_begins_with_the_hosts_name(monkeypatch):
    for host in ("node-7.cluster", "x" * 64):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert re.fullmatch(rf"{re.escape(host)}-[0-9a-f]{{12}}", machine())


@pytest.mark.process
def test_a_container_with_its_hosts_name_is_another_machine(in_a_container):
    output = in_a_container(f"import socket; print(socket.gethostname()); {SCRIPT}").split()
    assert output[0] == socket.gethostname()
    assert output[1] != machine()


def lay_out(root: Path, groups: str, **files: str | int) -> tuple[Path, Path]:
    """A tree of control groups, `a__b` being file b of folder a; and the file with our groups."""
    for name_of_file, content in files.items():
        *folders, name = name_of_file.split("__")
        path = root.joinpath(*folders, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    own_groups = root.parent / "own"
    own_groups.write_text(groups)
    return root, own_groups


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cgroup"


def test_the_nearest_limit_of_memory_counts(root):
    """A job of 8 GB, 3 GB of it taken, within a machine's slice of 20 GB, 19 GB of it taken."""
    files = {
        "slice__memory.max": 20 * GB,
        "slice__memory.current": 19 * GB,
        "slice__job__memory.max": 8 * GB,
        "slice__job__memory.current": 3 * GB,
        "slice__job__task__memory.max": "max",
        "slice__job__task__memory.current": 3 * GB,
    }
    where = lay_out(root, "0::/slice/job/task\n", **files)
    assert memory_limit(*where) == MemoryLimit(20 * GB, 1 * GB)
    (root / "slice" / "memory.max").write_text("max\n")
    assert memory_limit(*where) == MemoryLimit(8 * GB, 5 * GB)


def test_files_that_were_only_read_give_way(root):
    files = {"memory.max": 8 * GB, "memory.current": 8 * GB}
    statistics = f"anon {2 * GB}\nfile {6 * GB}\ninactive_file {5 * GB}"
    where = lay_out(root, "0::/\n", **files, **{"memory.stat": statistics})
    assert memory_limit(*where) == MemoryLimit(8 * GB, 5 * GB)


def test_version_1_has_a_tree_for_each_controller(root):
    """Within a container the path is that of the machine, and the tree's root is our own group."""
    groups = "9:cpu,cpuacct:/docker/f00\n4:memory:/docker/f00\n1:name=systemd:/docker/f00\n"
    files = {
        "memory__memory.limit_in_bytes": 4 * GB,
        "memory__memory.usage_in_bytes": 3 * GB,
        "memory__memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}",
        "cpu__cpu.cfs_quota_us": 150_000,
        "cpu__cpu.cfs_period_us": 100_000,
    }
    where = lay_out(root, groups, **files)
    assert memory_limit(*where) == MemoryLimit(4 * GB, 2 * GB)
    assert usable_cores(*where) == 1


def test_without_limits_there_is_none(root, tmp_path):
    assert memory_limit(root, tmp_path / "nowhere") is None
    files = {"memory.max": "max", "memory.current": GB, "cpu.max": "max 100000"}
    where = lay_out(root, "0::/\n", **files)
    assert memory_limit(*where) is None
    assert usable_cores(*where) == len(psutil.Process().cpu_affinity())


@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (100_000, 1), (10**12, None)])
def test_a_quota_bounds_the_cores(root, quota, cores):
    where = lay_out(root, "0::/job\n", **{"job__cpu.max": f"{quota} 100000"})
    assert usable_cores(*where) == (cores or len(psutil.Process().cpu_affinity()))


def test_this_machine_can_be_asked():
    limit = memory_limit()
    assert limit is None or 0 <= limit.remaining <= limit.limit
    assert 1 <= usable_cores() <= os.cpu_count()


def precisions() -> list[str]:
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    return [setting.fp32_precision for setting in settings]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_precision_of_float32_is_changed_for_a_while(precision):
    before = precisions()
    assert before[1] == "tf32", "torch's default, which is why this is needed"
    with pytest.raises(KeyError), float32_precision(precision):
        assert precisions() == [precision] * 2
        # Torch's own compiler reads the older flags, which must not contradict.
        older = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        assert older == (precision == "tf32",) * 2
        raise KeyError
    assert precisions() == before
    assert torch.backends.cudnn.allow_tf32, "who reads torch's older flags still can"


def test_a_precision_that_the_device_lacks_is_refused_by_the_settings_name():
    message = "annotation.dtype = float16: needs a GPU; use float32 or bfloat16 on a CPU"
    with pytest.raises(InputError, match=message):
        resolve_dtype("float16", "cpu", field="annotation.dtype")
