"""Which GPUs are visible, and the device that `auto` stands for."""

import os
import sys
from threading import Event

import pytest

from semix.data import device
from semix.data.errors import InputError
from semix.flows import gpus, quickstart
from semix.flows.build import build
from semix.flows.gpus import driver_gpus, gpu_fault, settled_device, visible_gpus
from semix.flows.launcher import Machines, check_machines
from semix.flows.slots import SlotSettings, check_slots


def test_the_driver_is_asked_where_nothing_was_chosen(nvidia_smi):
    nvidia_smi("echo 0; echo 1")
    assert visible_gpus() == ["0", "1"]
    nvidia_smi("echo 'No devices were found'; exit 6")
    assert visible_gpus() == []
    nvidia_smi("echo 0; echo 'WARNING: infoROM is corrupted at gpu 0000:03:00.0'; exit 14")
    assert visible_gpus() == ["0"]


def test_the_driver_is_asked_once_until_it_answers(nvidia_smi, tmp_path):
    call_log = tmp_path / "asked"
    nvidia_smi(f"echo >> {call_log}; exit 9")
    for _ in range(2):
        with pytest.raises(InputError, match="exit status 9"):
            visible_gpus()
    assert call_log.read_text() == "\n\n"
    nvidia_smi(f"echo >> {call_log}; echo 0")
    check_slots(SlotSettings(device="cuda"))
    check_machines(Machines(device="cuda"))
    assert visible_gpus() == ["0"] and settled_device("auto") == "cuda"
    assert call_log.read_text() == "\n\n\n"


@pytest.mark.process
def test_a_build_asks_the_driver_once(hasty_config, prefect_api, nvidia_smi, tmp_path):
    nvidia_smi(f"echo >> {tmp_path / 'asked'}; echo 'No devices were found'; exit 6")
    build(hasty_config, str(tmp_path / "mixed"), slots=2)
    assert (tmp_path / "asked").read_text() == "\n"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("4,7", ["4", "7"]),
        ("4, 7", ["4", "7"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
        ("GPU-5ebe9fa1,MIG-5ebe", ["GPU-5ebe9fa1", "MIG-5ebe"]),
    ],
)
def test_what_was_chosen_counts(nvidia_smi, chosen, found):
    nvidia_smi("echo 'NVIDIA-SMI has failed.'; exit 9")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == found


def test_auto_is_cuda_where_there_is_a_gpu(nvidia_smi):
    nvidia_smi("echo 0")
    assert [settled_device(d) for d in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert [settled_device(d, none) for d in ("auto", "cpu", "cuda")] == ["auto", "cpu", "cuda"]


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Failed to"),
        ("echo 0; echo 'Unable to determine the device handle for GPU1'; exit 15", "Unable to"),
        ("echo 0; echo 'Unable to determine the device handle for GPU1'", "Unable to determine"),
        ("exec sleep 60", "no answer within 1 s"),
    ],
)
def test_a_broken_driver_does_not_mean_the_cpu(nvidia_smi, monkeypatch, tmp_path, script, fault):
    monkeypatch.setattr(gpus, "ANSWER_S", 1.0)
    nvidia_smi(script)
    text = rf"^CUDA_VISIBLE_DEVICES = unset: nvidia-smi cannot list .* \({fault}.*or to nothing for"
    for name in ("auto", "cuda"):
        with pytest.raises(InputError, match=text):
            check_machines(Machines(device=name))
        with pytest.raises(InputError, match=text):
            check_slots(SlotSettings(device=name))
    with pytest.raises(InputError, match=text):
        quickstart.main(tmp_path / "out", seeds=1)
    check_machines(Machines(device="cpu"))
    check_slots(SlotSettings(device="cpu"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("", ""),
        ("print('CUDA error: lost'); exit(3)", "CUDA error: lost"),
        ("import signal, time; signal.alarm(1); time.sleep(600)", "it does not answer"),
        ("raise OSError('libtorch.so: input/output error')", ""),  # who knows
        ("import time; time.sleep(600)", ""),
    ],
)
def test_a_gpu_is_at_fault_if_a_process_that_asks_it_says_so(monkeypatch, code, fault):
    monkeypatch.setattr(gpus, "python_module", lambda module: [sys.executable, "-c", code])
    monkeypatch.setattr(gpus, "PROBE_S", 5.0)
    assert gpu_fault({}, Event()) == fault


@pytest.mark.process
def test_a_stop_does_not_wait_for_a_gpu(monkeypatch):
    code = "import time; time.sleep(600)"
    monkeypatch.setattr(gpus, "python_module", lambda module: [sys.executable, "-c", code])
    stop = Event()
    stop.set()
    assert gpu_fault({}, stop) == ""


@pytest.mark.process
def test_torch_is_asked_whether_a_gpu_works():
    assert device.BROKEN == gpus.BROKEN
    assert gpu_fault({"CUDA_VISIBLE_DEVICES": "63"}, Event())  # no machine has so many


@pytest.fixture
def gpu_file(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()


def test_a_gpu_that_the_driver_does_not_show_is_not_no_gpu(gpu_file, nvidia_smi, monkeypatch):
    nvidia_smi("echo 'No devices were found'; exit 6")
    with pytest.raises(InputError, match="No devices were found"):
        visible_gpus()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="there is a GPU but no nvidia-smi"):
        visible_gpus()
    monkeypatch.setattr(os, "open", raising(PermissionError))  # a job without GPUs
    assert visible_gpus() == []
    driver_gpus.cache_clear()
    monkeypatch.setattr(os, "open", raising(OSError))
    with pytest.raises(InputError, match="there is a GPU but no nvidia-smi"):
        visible_gpus()


def raising(kind):
    def fail(*_):
        raise kind

    return fail
