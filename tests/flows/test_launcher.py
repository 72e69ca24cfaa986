"""Several machines that train one model: their settings, their start, and equal results."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from semix.calib.config import TrainConfig
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.flows import train as training
from semix.flows.child import supervise
from semix.flows.launcher import (
    Machines,
    check_machines,
    launch_command,
    launcher_settings,
    trainer_environment,
    write_launcher,
)
from semix.flows.train import claim
from tests.calib.runs import free_port, history
from tests.trainings import SETTINGS, claimed, train_here

MAIN = "10.0.0.1:29500"


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count): so many GPUs are visible."""

    def set_count(count: int) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))

    return set_count


@pytest.mark.parametrize(
    ("machines", "text"),
    [
        (Machines(3, 2, 0, MAIN), r"^processes = 3: 2 machines share them equally; choose a mul"),
        (Machines(1, 2, 0, MAIN), r"^processes = 1: 2 machines share them equally"),
        (Machines(2, 2, 2, MAIN), r"^machine_rank = 2: choose 0 to 1, a different one on each"),
        (Machines(2, 1, 1), r"^machine_rank = 1: choose 0 to 0"),
        (Machines(2, 2, 0), r"^main_process = none: give HOST:PORT of machine 0, the same on ev"),
        (Machines(2, 2, 0, "host"), r"^main_process = host: give HOST:PORT of machine 0"),
        (Machines(2, 2, 0, "host:70000"), r"^main_process = host:70000: give HOST:PORT"),
        (Machines(1, 1, 0, MAIN), r"^main_process = 10\.0\.0\.1:29500: is for several machines"),
        (Machines(8, 2, 0, MAIN), r"^processes = 4: one per GPU, and 3 are visible; choose fewer$"),
    ],
)
def test_what_does_not_go_together_is_named(gpus, machines, text):
    gpus(3)
    with pytest.raises(InputError, match=text):
        check_machines(machines)


def test_a_gpu_that_is_asked_for_must_be_there(gpus):
    gpus(0)
    check_machines(Machines(2, device="cpu"))
    with pytest.raises(InputError, match=r"^device = cuda: no GPU is visible here; choose auto"):
        check_machines(Machines(device="cuda"))
    gpus(1)
    check_machines(Machines(device="cuda"))
    check_machines(Machines(2, device="cpu"))


def test_accelerate_is_told_of_the_machines(gpus):
    gpus(4)
    config = load_settings(TrainConfig, SETTINGS)
    settings = launcher_settings(config, Machines(8, 2, 1, MAIN))
    assert settings["distributed_type"] == "MULTI_GPU"
    assert (settings["num_processes"], settings["num_machines"], settings["machine_rank"]) == (
        8,
        2,
        1,
    )
    assert (settings["main_process_ip"], settings["main_process_port"]) == ("10.0.0.1", 29500)
    assert not settings["use_cpu"]
    assert trainer_environment(Machines(device="cpu"))["CUDA_VISIBLE_DEVICES"] == ""
    assert launcher_settings(config, Machines(device="cpu"))["use_cpu"]


def test_machine_1_waits_until_machine_0_has_begun_the_same(tmp_path, monkeypatch):
    config = load_settings(TrainConfig, SETTINGS)
    other_config = load_settings(TrainConfig, SETTINGS, ["epochs=9"])
    run, machine_0, machine_1 = tmp_path / "run", Machines(2, 2, 0, MAIN), Machines(2, 2, 1, MAIN)
    monkeypatch.setattr(training, "LOOK_S", 0.01)
    claim(other_config, run, machine_0)  # what a former run that never began has left
    late = threading.Timer(0.2, claim, (config, run, machine_0))
    late.start()
    path = claim(config, run, machine_1)
    assert json.loads(path.read_text())["epochs"] == config.epochs
    late.join()
    monkeypatch.setattr(training, "CLAIM_TIMEOUT_S", 0.05)
    with pytest.raises(InputError, match=r"^out = .*/run: machine 0 has not begun"):
        claim(other_config, run, machine_1)


@pytest.mark.process
def test_two_machines_train_as_one_process_does(tmp_path):
    """The model has no batch norms, whose statistics are of one process's images."""
    changes = {
        "model": {"name": "lenet"},
        "optimiser": {"learning_rate": 0.02, "schedule": "constant"},
        "batch_size": 20,
        "epochs": 2,
    }
    config, address = load_settings(TrainConfig, {**SETTINGS, **changes}), free_port()
    run = claimed(tmp_path / "two", **changes).parent

    def machine(rank: int) -> tuple[int, list[str]]:
        machines = Machines(2, 2, rank, f"127.0.0.1:{address}", "cpu")
        folder = tmp_path / f"machine-{rank}"
        folder.mkdir()
        launcher, lines = write_launcher(config, folder, machines), []
        command = launch_command(
            launcher, ["--config", str(run / "config.json")], num_processes=machines.local_processes
        )
        environment = trainer_environment(machines)
        outcome = supervise(command, on_line=lines.append, environment=environment)
        return outcome.returncode, lines

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(machine, range(2)))
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    expected = history(train_here(claimed(tmp_path / "one", **changes).parent))
    for result, line in zip(history(run), expected, strict=True):
        assert result.pop("stage") == line.pop("stage")
        assert result == pytest.approx(line, rel=1e-4, abs=1e-6)
