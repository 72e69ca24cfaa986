"""Checkpoints: complete or absent, read without running code, and exact about shapes."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from calib.checkpoint import (
    latest_checkpoint,
    load_exactly,
    read_metadata,
    save_checkpoint,
    save_tensors,
)
from data.errors import InputError


def save(folder, position, module):
    optimiser = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    return save_checkpoint(
        folder,
        position,
        tensors={"network": module.state_dict()},
        objects={"optimiser": optimiser.state_dict()},
        state={"epoch": position},
    )


def test_everything_comes_back(tmp_path):
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path, 7, module)
    found = latest_checkpoint(tmp_path)
    found.load_module("network", other)
    torch.testing.assert_close(other.weight, module.weight, rtol=0, atol=0)
    optimiser = torch.optim.AdamW(other.parameters())
    optimiser.load_state_dict(found.objects()["optimiser"])
    assert optimiser.state[other.weight]["exp_avg"].abs().sum() > 0
    assert found.state == {"epoch": 7}


def test_a_new_one_replaces_the_old(tmp_path):
    save(tmp_path, 9, nn.Linear(3, 2))
    save(tmp_path, 10, nn.Linear(3, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["000010"]


def test_what_else_lies_there_ends_no_training(tmp_path):
    save(tmp_path, 9, nn.Linear(3, 2))
    (tmp_path / ".DS_Store").write_text("")
    save(tmp_path, 10, nn.Linear(3, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".DS_Store", "000010"]
    assert latest_checkpoint(tmp_path).state == {"epoch": 10}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_tensors_that_were_read_hold_no_file(tmp_path):
    """A network's file system keeps a file that is mapped, and its folder with it."""
    save(tmp_path, 9, nn.Linear(3, 2))
    tensors = latest_checkpoint(tmp_path).tensors("network")
    assert tensors["weight"].shape == (2, 3)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_one_in_an_epoch_is_between_those_before_and_after(tmp_path):
    parts = {"tensors": {}, "objects": {}}
    save_checkpoint(tmp_path / "a", 9, **parts, state={"epoch": 9})
    between = save_checkpoint(tmp_path / "b", 9, step=40, **parts, state={"epoch": 9, "step": 40})
    save_checkpoint(tmp_path / "c", 10, **parts, state={"epoch": 10})
    shutil.move(between, tmp_path / "a")
    assert latest_checkpoint(tmp_path / "a").state == {"epoch": 9, "step": 40}
    shutil.move(tmp_path / "c" / "000010", tmp_path / "a")
    assert latest_checkpoint(tmp_path / "a").state == {"epoch": 10}


def test_a_half_written_one_does_not_count_and_is_swept(tmp_path):
    half = tmp_path / ".000002.partial"
    half.mkdir()
    (half / "network.safetensors").write_bytes(b"cut off")
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 1, nn.Linear(3, 2))
    half.mkdir()
    assert latest_checkpoint(tmp_path).state == {"epoch": 1}
    save(tmp_path, 2, nn.Linear(3, 2))
    assert latest_checkpoint(tmp_path).state == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]


def test_a_failed_save_leaves_the_old_one(tmp_path):
    save(tmp_path, 1, nn.Linear(3, 2))
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 2, tensors={}, objects={}, state={"epoch": object()})
    assert latest_checkpoint(tmp_path).state == {"epoch": 1}


def test_no_folder_holds_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Linear(4, 2), r"weight = \(2, 3\): the model has \(2, 4\); was it trained for other"),
        (nn.Linear(3, 2, bias=False), r"bias = \(2,\): the model has none"),
        (nn.Sequential(nn.Linear(3, 2)), r"0\.weight = none: the model has \(2, 3\)"),
    ],
)
def test_the_tensor_that_does_not_fit_is_named(tmp_path, module, text):
    path = tmp_path / "network.safetensors"
    save_tensors(path, nn.Linear(3, 2).state_dict())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(InputError, match=text):
        load_exactly(module, path)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_tensors_of_another_memory_format_keep_their_values(tmp_path):
    conv, other = nn.Conv2d(4, 5, 3).to(memory_format=torch.channels_last), nn.Conv2d(4, 5, 3)
    save_tensors(tmp_path / "conv.safetensors", conv.state_dict(), metadata={"digest": "d"})
    load_exactly(other, tmp_path / "conv.safetensors")
    torch.testing.assert_close(other.weight, conv.weight, rtol=0, atol=0)
    assert read_metadata(tmp_path / "conv.safetensors") == {"digest": "d"}
    assert read_metadata(tmp_path / "none.safetensors") == {}


def test_objects_come_back_as_they_were(tmp_path):
    """Kinds of keys and containers, memory formats, and numbers to the last bit."""
    kernel = torch.rand(4, 3, 3, 3).to(memory_format=torch.channels_last)
    objects = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": kernel}, 11: {}},
        "groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "foreach": None, "fused": True}],
        "random": torch.get_rng_state(),
        "half": torch.rand(3).bfloat16(),
        "worst": float("-inf"),
        "history": [{"epoch": 1, "loss": 1e-300, "kind": "reset"}],
        "none": None,
    }
    save_checkpoint(tmp_path, 1, tensors={}, objects=objects, state={})
    found = latest_checkpoint(tmp_path).objects()
    again = found["state"][0]["exp_avg"]
    assert again.stride() == kernel.stride()
    assert [*found["state"]] == [0, 11]
    assert found["groups"] == objects["groups"]
    assert found["history"] == objects["history"]
    assert (found["worst"], found["none"]) == (float("-inf"), None)
    for one, other in (
        (again, kernel),
        (found["state"][0]["step"], objects["state"][0]["step"]),
        (found["random"], objects["random"]),
        (found["half"], objects["half"]),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
