"""Errors of the command line for paths and values that it cannot use, with their remedies."""

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from semix.calib.checkpoint import save_checkpoint
from tests.command import semix
from tests.handmade import make_root


def error_line(*arguments: str) -> str:
    """The one line of an error in the input."""
    status, out, err = semix(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize("command", ["status", "verify", "resume", "failures"])
def test_a_root_that_is_not_there_is_no_such_folder(command, tmp_path):
    path = tmp_path / "nope"
    message = error_line(command, str(path))
    assert message == f"url = {path}: there is no such folder; start it with `semix build`"
    path.mkdir()
    assert error_line(command, str(path)).startswith(f"url = {path}: holds no plan.json; start")


@pytest.mark.parametrize("command", [("resume",), ("relabel", "--set", "annotation.scale=4")])
def test_a_gpu_that_is_demanded_and_not_here_is_refused_whatever_is_left_to_do(
    command, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    name, *options = command
    root = make_root(tmp_path, 1, 2)
    root.write_index()
    message = error_line(name, root.url, *options, "--device", "cuda")
    assert message.startswith("device = cuda: no GPU is visible on this machine; use cpu, or run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("export x --to y --format hugingface", "did you mean huggingface? choose one of folder,"),
        ("build x --out y --runner daks", "did you mean dask? choose one of local, dask, ray"),
        ("train x --out y --device gpu", "'gpu': choose one of auto, cpu, cuda"),
        ("config biuld", "did you mean build? choose one of build, train, study"),
    ],
)
def test_an_option_that_is_no_choice_is_answered_with_the_nearest(arguments, said):
    status, out, err = semix(*arguments.split(), NO_COLOR="1")
    assert (status, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system of limited size")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.process
@pytest.mark.parametrize("format", ["folder", "parquet", "huggingface"])
def test_an_export_names_the_place_whose_disk_is_full(format, small_disk, tmp_path):
    root = make_root(tmp_path / "root", 8, 8, count=8, side=32)
    target = small_disk / "export"
    status, out, err = semix("export", root.url, "--to", str(target), "--format", format)
    assert (status, out) == (1, "")
    assert err == f"error: the disk is full at {target}; free some space, or choose another place\n"
    assert list(small_disk.iterdir()) == []


@pytest.mark.process
def test_a_training_names_the_file_whose_disk_is_full(small_disk):
    weights = {"model": {"weight": torch.zeros(99_999)}}
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_checkpoint(small_disk / "checkpoint", 1, tensors=weights, objects={}, state={})
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.filename).name == "model.safetensors"
