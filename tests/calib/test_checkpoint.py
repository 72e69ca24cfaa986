"""Checkpoints: whole or absent, exact about shapes; read without running code, or refused."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_bytes
from torch import nn

from semix.calib.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_exactly,
    read_metadata,
    save_checkpoint,
    save_tensors,
)
from semix.data.errors import InputError


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
    checkpoint = latest_checkpoint(tmp_path)
    checkpoint.load_module("network", other)
    torch.testing.assert_close(other.weight, module.weight, rtol=0, atol=0)
    optimiser = torch.optim.AdamW(other.parameters())
    optimiser.load_state_dict(checkpoint.objects()["optimiser"])
    assert optimiser.state[other.weight]["exp_avg"].abs().sum() > 0
    assert checkpoint.state == {"epoch": 7}


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


def test_only_names_of_checkpoints_are_removed(tmp_path):
    """Foreign files and folders beside the checkpoints stay, whatever their names."""
    save(tmp_path, 9, nn.Linear(3, 2))
    foreign_names = ["photos", "2019", "2019-07", "000009.bak", ".photos.partial", "000008.tar"]
    for name in foreign_names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_text("precious")
    (tmp_path / "000007").symlink_to("photos")
    save(tmp_path, 10, nn.Linear(3, 2))
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == {*foreign_names, "000007", "000010"}
    assert all((tmp_path / name / "a.jpg").exists() for name in foreign_names)


def test_a_link_is_no_checkpoint_and_no_folder_of_them(tmp_path):
    save(tmp_path / "real", 9, nn.Linear(3, 2))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "000010").symlink_to("../real/000009")
    assert latest_checkpoint(tmp_path / "run") is None
    (tmp_path / "linked").symlink_to("real")
    with pytest.raises(InputError, match=r"^checkpoint = .*/linked: is a link"):
        save(tmp_path / "linked", 10, nn.Linear(3, 2))
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["000009"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_tensors_that_were_read_hold_no_file(tmp_path):
    """A network file system keeps a file that is mapped, and with it the folder."""
    save(tmp_path, 9, nn.Linear(3, 2))
    tensors = latest_checkpoint(tmp_path).tensors("network")
    assert tensors["weight"].shape == (2, 3)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_one_in_an_epoch_is_between_those_before_and_after(tmp_path):
    empty = {"tensors": {}, "objects": {}}
    save_checkpoint(tmp_path / "a", 9, **empty, state={"epoch": 9})
    between = save_checkpoint(tmp_path / "b", 9, step=40, **empty, state={"epoch": 9, "step": 40})
    save_checkpoint(tmp_path / "c", 10, **empty, state={"epoch": 10})
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
    result = latest_checkpoint(tmp_path).objects()
    moment = result["state"][0]["exp_avg"]
    assert moment.stride() == kernel.stride()
    assert [*result["state"]] == [0, 11]
    assert result["groups"] == objects["groups"]
    assert result["history"] == objects["history"]
    assert (result["worst"], result["none"]) == (float("-inf"), None)
    for actual, expected in (
        (moment, kernel),
        (result["state"][0]["step"], objects["state"][0]["step"]),
        (result["random"], objects["random"]),
        (result["half"], objects["half"]),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Trap:
    def __reduce__(self):
        return pytest.fail, ("the checkpoint ran code",)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A checkpoint whose optimiser has one tensor of state."""
    return save_checkpoint(
        tmp_path / "checkpoint",
        1,
        tensors={"network": nn.Linear(3, 2).state_dict()},
        objects={"optimiser": {"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}},
        state={"epoch": 1},
    )


def objects_of(checkpoint: Path) -> dict:
    return latest_checkpoint(checkpoint.parent).objects()


def test_a_checkpoint_holds_safetensors_and_json_alone(checkpoint):
    """Nobody can hide code in a format that a checkpoint never has."""
    assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors", ".json"}


def test_a_pickle_laid_beside_is_never_read(checkpoint):
    """The attacker adds the optimiser as a pickle, as other trainers keep theirs."""
    torch.save({"optimiser": Trap()}, checkpoint / "objects.pt")
    (checkpoint / "optimizer.bin").write_bytes(pickle.dumps(Trap()))
    assert objects_of(checkpoint)["optimiser"]["betas"] == (0.9, 0.999)


def pickled() -> bytes:
    """What `torch.save` writes: an archive with a pickle in it."""
    content = io.BytesIO()
    torch.save({"weight": Trap()}, content)
    return content.getvalue()


@pytest.mark.parametrize("content", [pickled(), pickle.dumps(Trap()), b"", b"\xff" * 64])
@pytest.mark.parametrize("name", ["network", "objects"])
def test_a_pickle_named_safetensors_is_refused_in_our_words(checkpoint, name, content):
    """The attacker renames a pickle, or cuts the file off."""
    (checkpoint / f"{name}.safetensors").write_bytes(content)
    opened = Checkpoint(checkpoint)
    with pytest.raises(InputError, match=rf"{name}\.safetensors: is no complete safetensors file"):
        if name == "objects":
            opened.objects()
        else:
            opened.load_module(name, nn.Linear(3, 2))


def test_trained_weights_that_are_a_pickle_are_refused_in_our_words(tmp_path):
    """The attacker gives away a trained model whose weights are a pickle."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickled())
    with pytest.raises(InputError, match=r"model\.safetensors: is no complete safetensors file"):
        load_exactly(nn.Linear(3, 2), path)
    with pytest.raises(InputError, match=r"model\.safetensors: is no complete safetensors file"):
        read_metadata(path)


@pytest.mark.parametrize(
    "content",
    [
        '{"dict": [["optimiser", {"tensor": "7"}]]}',  # no such tensor
        '{"dict": [["optimiser", {"tensor": 0}]]}',
        '{"dict": [["optimiser", {"python": "os.system"}]]}',
        '{"dict": [[["a"], 1]]}',  # a key that is no text and no number
        '{"dict": [["a", 1, 2]]}',
        '{"dict": 3}',
        '{"dict": [3]}',
        '{"dict": [["optimiser", {"tensor": "0", "channels_last": true}]]}',  # of one dimension
        "[1, 2]",  # no dictionary
        '{"dict": ',
        "[" * 100_000 + "]" * 100_000,
        b"\x80\x04.".decode("latin-1"),
    ],
)
def test_objects_of_another_form_are_refused_in_our_words(checkpoint, content):
    """The attacker writes a tree of state that semix never writes."""
    (checkpoint / "objects.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"objects\.json: is damaged; remove .*000001"):
        objects_of(checkpoint)


def test_what_has_no_place_in_a_checkpoint_is_not_written(tmp_path):
    """An object that only a pickle could hold does not get in unseen."""
    with pytest.raises(TypeError, match="Trap"):
        save_checkpoint(tmp_path, 1, tensors={}, objects={"optimiser": [Trap()]}, state={})
    assert latest_checkpoint(tmp_path) is None


def test_a_tensor_no_larger_than_its_file(checkpoint):
    """The attacker's header promises more numbers than the file has."""
    content = bytearray(save_bytes({"0": torch.ones(2)}))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + length]))
    header["0"]["shape"] = [2**40]
    encoded = json.dumps(header).encode()
    path = checkpoint / "objects.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(content[8 + length :]))
    with pytest.raises(InputError, match="is no complete safetensors file"):
        objects_of(checkpoint)
