"""A run folder: one run's settings and data, and one training of a seed at a time."""

import json
import subprocess
import sys

import pytest

from semix.calib import run_folder
from semix.calib.checkpoint import save_tensors
from semix.calib.network import Network, load_trained
from semix.calib.run_folder import (
    CONFIG,
    EVALUATION,
    MODEL,
    MixedPin,
    claim_run,
    is_measured,
    mixed_pin,
    pin_data,
    require_trained,
    seed_folder,
    seed_lock,
)
from semix.calib.stopping import Interrupted
from semix.data.errors import InputError
from semix.data.files import write_json


def test_a_run_folder_takes_more_seeds_but_no_other_settings(make_config, tmp_path):
    claim_run(make_config(), tmp_path)
    claim_run(make_config("epochs=5"), tmp_path)  # no seed was begun
    (tmp_path / "seed-0").mkdir()
    claim_run(make_config("epochs=5", "seeds=[0,1]"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["seeds"] == [0, 1]
    with pytest.raises(InputError, match=r"epochs: 5 there, 6 now; "):
        claim_run(make_config("epochs=6", "head=null"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 5


def test_large_images_take_another_stem_from_96_pixels_on(make_config):
    model = "model={name: resnet18, width: 2}"
    sides = {side: make_config(f"real.image_size={side}", model) for side in (95, 96)}
    assert "stem" not in sides[95].model.params
    assert sides[96].model.params["stem"] == "imagenet"
    small_stem = make_config("real.image_size=224", "model={name: resnet18, stem: small}")
    assert small_stem.model.params["stem"] == "small"


ALONE = ("mixed=null", "head=null")


@pytest.fixture
def earlier(make_config, tmp_path):
    """A run on large images from before these had a stem of their own; its path and settings."""
    model = "model={name: resnet18, width: 2, stem: small}"
    config = make_config("real.image_size=96", model, *ALONE)
    run = claim_run(config, tmp_path / "run").parent
    pin_data({"real": "1" * 64, "class_names": ["a", "b"], "mixed": None}, run)
    save_tensors(seed_folder(run, 0) / MODEL, Network(config, 2).state_dict())
    stored = json.loads((run / CONFIG).read_text())
    del stored["model"]["stem"]
    write_json(run / CONFIG, stored)
    return run, config


def test_a_run_of_the_stem_that_large_images_had_before_is_named(earlier, make_config):
    run, config = earlier
    for open_run in (lambda: load_trained(run, 0), lambda: require_trained(run)):
        with pytest.raises(InputError, match=r"config\.json model\.stem = None: .* stem for small"):
            open_run()
    new = make_config("real.image_size=96", "model={name: resnet18, width: 2}", *ALONE)
    write_json(run / EVALUATION, {"rows": []})
    assert not is_measured(new, run)
    with pytest.raises(InputError, match=r"^run = .*model\.stem: not set there, small now"):
        claim_run(config, run)
    write_json(run / CONFIG, config.model_dump(mode="json"))  # as the message advises
    assert load_trained(run, 0).network.backbone.features.stem[0].kernel_size == (3, 3)


@pytest.mark.parametrize(("before", "now"), [("none", "given"), ("given", "none")])
def test_a_section_that_one_side_lacks_is_one_difference(before, now, make_config, tmp_path):
    sides = {"none": "early_stop=null", "given": "early_stop={patience: 3}"}
    claim_run(make_config(sides[before]), tmp_path)
    (tmp_path / "seed-0").mkdir()
    with pytest.raises(InputError) as caught:
        claim_run(make_config(sides[now]), tmp_path)
    assert (caught.value.field, caught.value.value) == ("run", tmp_path)
    assert f"(early_stop: {before} there, {now} now); choose a fresh" in caught.value.remedy


def test_data_are_pinned_once_a_seed_was_begun(tmp_path):
    def record(index):
        return {"real": "r", "mixed": {"url": "u", "index": index, "digest": "d"}}

    pin_data(record("index/0.json"), tmp_path)
    assert mixed_pin(tmp_path) == MixedPin()
    pin_data(record("index/1.json"), tmp_path)
    (tmp_path / "seed-0").mkdir()
    assert mixed_pin(tmp_path) == MixedPin("index/1.json")
    with pytest.raises(InputError, match=r"data\.json mixed = .*choose a fresh run folder"):
        pin_data(record("index/2.json"), tmp_path)


HOLDER = """
import sys, time
from pathlib import Path
from semix.calib.run_folder import seed_lock
with seed_lock(Path(sys.argv[1]), label="first"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def lock_holder(tmp_path):
    """Another process that holds the lock of seed-0."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "seed-0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.process
def test_another_training_of_the_seed_is_named(lock_holder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_S", 0.3)
    message = rf"^run = {tmp_path}: another training works in seed-0; wait for its end, or stop it"
    with (
        pytest.raises(InputError, match=message),
        seed_lock(tmp_path / "seed-0", label="second"),
    ):
        raise AssertionError("both hold it")
    waiting = f"second: waiting for another training in {tmp_path / 'seed-0'} to end"
    assert capsys.readouterr().out.splitlines() == [waiting]
    with seed_lock(tmp_path / "seed-1", label="second"):  # another seed is free
        pass


@pytest.mark.process
def test_a_training_that_was_killed_lets_go(lock_holder, tmp_path):
    def stop() -> bool:  # asked while we wait
        lock_holder.kill()
        return False

    with seed_lock(tmp_path / "seed-0", label="second", stop=stop):
        assert lock_holder.wait() < 0


@pytest.mark.process
def test_who_waits_can_be_stopped(lock_holder, tmp_path):
    with (
        pytest.raises(Interrupted, match=r"^second: stopped before it began"),
        seed_lock(tmp_path / "seed-0", label="second", stop=lambda: True),
    ):
        raise AssertionError("both hold it")
