"""Checkpoints and weights that somebody prepared: read as safetensors and JSON, or refused."""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from calib.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_exactly,
    read_metadata,
    save_checkpoint,
)
from data.errors import InputError


class Trap:
    def __reduce__(self):
        return pytest.fail, ("the checkpoint ran code",)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Of an optimiser with one tensor of state."""
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
    with pytest.raises(InputError, match=rf"{name}\.safetensors: is no whole safetensors file"):
        if name == "objects":
            opened.objects()
        else:
            opened.load_module(name, nn.Linear(3, 2))


def test_trained_weights_that_are_a_pickle_are_refused_in_our_words(tmp_path):
    """The attacker gives away a trained model whose weights are a pickle."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickled())
    with pytest.raises(InputError, match=r"model\.safetensors: is no whole safetensors file"):
        load_exactly(nn.Linear(3, 2), path)
    with pytest.raises(InputError, match=r"model\.safetensors: is no whole safetensors file"):
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
    content = bytearray(save({"0": torch.ones(2)}))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + length]))
    header["0"]["shape"] = [2**40]
    spelled = json.dumps(header).encode()
    path = checkpoint / "objects.safetensors"
    path.write_bytes(len(spelled).to_bytes(8, "little") + spelled + bytes(content[8 + length :]))
    with pytest.raises(InputError, match="is no whole safetensors file"):
        objects_of(checkpoint)
