"""Which GPUs there are, and what auto means where there are some."""

import sys

import pytest

from data.errors import InputError
from flows import gpus, quickstart
from flows.gpus import gpu_works, settled_device, visible_gpus
from flows.machines import Machines, check_machines
from flows.slots.settings import SlotSettings, check_slots


def test_the_driver_is_asked_where_nothing_was_chosen(nvidia_smi):
    nvidia_smi("echo 0; echo 1")
    assert visible_gpus() == ["0", "1"]
    nvidia_smi("echo 'No devices were found'; exit 6")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("4,7", ["4", "7"]), ("", []), ("-1", []), ("GPU-5ebe9fa1", ["GPU-5ebe9fa1"])],
)
def test_what_was_chosen_counts(nvidia_smi, chosen, found):
    nvidia_smi("echo 'NVIDIA-SMI has failed.'; exit 9")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == found


def test_auto_is_cuda_where_there_is_a_gpu(nvidia_smi):
    nvidia_smi("echo 0")
    assert [settled_device(device) for device in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert [settled_device(d, none) for d in ("auto", "cpu", "cuda")] == ["auto", "cpu", "cuda"]


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Failed to"),
        ("echo 0; echo 'Unable to determine the device handle for GPU1'", "Unable to determine"),
        ("exec sleep 60", "no answer within 1 s"),
    ],
)
def test_a_broken_driver_does_not_mean_the_cpu(nvidia_smi, monkeypatch, tmp_path, script, fault):
    monkeypatch.setattr(gpus, "ANSWER_S", 1.0)
    nvidia_smi(script)
    text = rf"^CUDA_VISIBLE_DEVICES = unset: nvidia-smi cannot say .* \({fault}.*or to nothing, for"
    for device in ("auto", "cuda"):
        with pytest.raises(InputError, match=text):
            check_machines(Machines(device=device))
        with pytest.raises(InputError, match=text):
            check_slots(SlotSettings(device=device))
    with pytest.raises(InputError, match=text):
        quickstart.main(tmp_path / "out", seeds=1)
    check_machines(Machines(device="cpu"))
    check_slots(SlotSettings(device="cpu"))


@pytest.mark.parametrize(
    ("code", "works"), [("", True), ("exit(1)", False), ("import time; time.sleep(600)", False)]
)
def test_a_gpu_works_if_a_process_says_so_in_time(monkeypatch, code, works):
    monkeypatch.setattr(gpus, "python_module", lambda module: [sys.executable, "-c", code])
    monkeypatch.setattr(gpus, "PROBE_S", 5.0)
    assert gpu_works({}) == works


def test_torch_is_asked_whether_a_gpu_works():
    assert not gpu_works({"CUDA_VISIBLE_DEVICES": "63"})  # no machine has so many
