"""Which GPUs there are, and what auto means where there are some."""

import pytest

from flows.gpus import settled_device, visible_gpus


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """smi(script): what nvidia-smi does here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_the_driver_is_asked_where_nothing_was_chosen(smi):
    smi("echo 0; echo 1")
    assert visible_gpus() == ["0", "1"]
    smi("echo 'No devices were found'; exit 6")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [("4,7", ["4", "7"]), ("", []), ("-1", []), ("GPU-5ebe9fa1", ["GPU-5ebe9fa1"])],
)
def test_what_was_chosen_counts(smi, chosen, gpus):
    smi("echo 0")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == gpus


def test_auto_is_cuda_where_there_is_a_gpu(smi):
    smi("echo 0")
    assert [settled_device(device) for device in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert [settled_device(d, none) for d in ("auto", "cpu", "cuda")] == ["auto", "cpu", "cuda"]
