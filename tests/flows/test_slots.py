"""Where slots are and how many, and how a flow follows them; whole builds are in other files."""

import importlib.util
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from socket import create_server, gethostname

import pytest
from prefect import flow

from semix.data.errors import InputError
from semix.data.machine import usable_cores
from semix.flows import slots
from semix.flows.slots import IMPORTS, MAX_SLOTS, SlotSettings, check_slots, is_here, running
from semix.flows.slots.running import follow, local_slots, run_slots
from semix.flows.slots.slot import WorkerFailed
from tests.data.whole_roots import empty_root

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SlotSettings(MAX_SLOTS + 1), r"slots = 191: 0 to 190; to use more"),
        (SlotSettings(-1), r"slots = -1: 0 to 190"),
        (SlotSettings(runner="slurm"), r"runner = slurm: is none of local, dask, ray"),
        (SlotSettings(device="tpu"), r"device = tpu: is none of auto, cpu, cuda"),
        (SlotSettings(range="4/4"), r"range = 4/4: write i/n"),
        (SlotSettings(cluster="tcp://h:1"), r"cluster = tcp://h:1: needs --runner dask or ray"),
        (
            SlotSettings(runner="dask", cluster="tcp://10.0.0.1:8786"),
            r"cluster = tcp://10\.0\.0\.1:8786: its machines cannot reach a Prefect server on this "
            r"machine's loopback; set PREFECT_API_URL",
        ),
        (
            SlotSettings(runner="dask", cluster="tcp://127.0.0.1:9"),
            r"cluster = tcp://127\.0\.0\.1:9: nothing answers there .* write tcp://HOST:8786",
        ),
        (
            SlotSettings(runner="ray", cluster="127.0.0.1:9"),
            r"cluster = 127\.0\.0\.1:9: nothing answers there .* write ray://HOST:10001, or auto",
        ),
        (
            SlotSettings(runner="ray", cluster="127.0.0.1:100000"),
            r"cluster = 127\.0\.0\.1:100000: nothing answers there",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(settings, said):
    with pytest.raises(InputError, match=said):
        check_slots(settings)


def test_what_can_be_is_let_through():
    with create_server(("127.0.0.1", 0)) as listening:
        scheduler = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        for settings in (
            SlotSettings(),
            SlotSettings(MAX_SLOTS, range="3/4", device="cpu"),
            SlotSettings(runner="dask", cluster=scheduler),
            SlotSettings(runner="ray", cluster="auto", device="cuda"),  # its slots look for GPUs
        ):
            check_slots(settings)


@pytest.mark.parametrize(
    ("device", "cluster", "own"),
    [
        ("cpu", "", "cpu"),
        ("auto", "", "cuda"),
        ("cuda", "", "cuda"),
        ("cpu", "auto", "cpu"),
        ("auto", "auto", "auto"),  # whether this machine has a GPU or not
        ("cuda", "auto", "auto"),
    ],
)
def test_the_flow_itself_works_where_the_slots_may_work(device, cluster, own, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert SlotSettings(0, "ray", cluster, device=device).flow_device == own


def test_a_gpu_that_is_asked_for_and_not_there_is_told_at_once(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for runner in ("local", "dask", "ray"):
        with pytest.raises(InputError, match="device = cuda: no GPU is visible on this machine"):
            check_slots(SlotSettings(runner=runner, device="cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check_slots(SlotSettings(device="cuda"))


def test_local_slots_have_a_gpu_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with local_slots(SlotSettings()) as local:
        assert [env["CUDA_VISIBLE_DEVICES"] for env in local.environments] == [
            "4",
            "7",
        ]
    with local_slots(SlotSettings(3)) as local:
        assert [env["CUDA_VISIBLE_DEVICES"] for env in local.environments] == ["4", "7", "4"]
    with local_slots(SlotSettings(device="cpu")) as local:
        cores = str(usable_cores())
        assert local.environments == [{"TQDM_DISABLE": "1", "OMP_NUM_THREADS": cores}]


def test_a_slot_whose_gpu_is_gone_does_not_go_on_without(prefect_api, root, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "63")  # no machine has so many
    root.discard(3)

    @flow
    def one():
        with run_slots(root.url, SlotSettings()) as futures:
            return [future.result(raise_on_failure=False) for future in futures]

    [result] = one()
    assert isinstance(result, WorkerFailed)
    assert "exit status 78: device = cuda: torch sees no GPU here" in str(result)
    assert root.missing() == [3]


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_an_extra_that_is_not_installed_is_named(runner, monkeypatch):
    missing = f"prefect_{runner}"
    monkeypatch.setattr(
        slots, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(InputError, match=rf"not installed; run pip install .*\[{runner}\]'"):
        check_slots(SlotSettings(runner=runner))


@pytest.mark.parametrize("extra", ["prefect_dask", "prefect_ray"])
def test_the_extras_are_here_to_be_tested(extra):
    assert importlib.util.find_spec(extra)


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("tcp://127.0.0.1:8786", True),
        ("localhost:8786", True),
        ("tls://[::1]:8786", True),
        ("auto", True),
        (gethostname(), True),
        ("127.0.0.1", True),
        ("ray://10.1.2.3:10001", False),
        ("tcp://[fe80::1]:8786", False),
        ("head-node:6379", False),
    ],
)
def test_addresses_of_this_machine_are_known(address, here):
    assert is_here(address) == here


class FakeFuture:
    """A slot's future, which ends when it is told to."""

    def add_done_callback(self, callback) -> None:
        self.end = lambda: callback(self)

    def result(self, *, raise_on_failure: bool) -> None: ...


def test_a_store_that_is_silent_for_a_while_ends_no_slot(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(running, "LOOK_EVERY_S", 0.0)
    faults = {
        2: OSError(116, "Stale file handle"),
        3: OSError(116, "Stale file handle"),
        5: InputError("url", "s3://bucket", "refused: log in again"),
    }
    root = empty_root(tmp_path)
    slot, updates, looks, progress = FakeFuture(), [], [], root.progress

    def look():
        looks.append(1)
        if len(looks) == 6:
            slot.end()
        if fault := faults.get(len(looks)):
            raise fault
        return progress()

    monkeypatch.setattr(root, "progress", look)
    assert follow([slot], root, listeners=[updates.append]) == []
    assert (len(looks), len(updates)) == (7, 4)  # the last once the slot had ended
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "progress is not known; the slots go on: [Errno 116] Stale file handle",
        "progress is not known; the slots go on: url = s3://bucket: refused: log in again",
    ]


@pytest.mark.process
def test_what_workers_import_ahead_is_all_that_takes_seconds():
    script = "import sys, importlib\n" + "".join(f"import {name}\n" for name in IMPORTS)
    script += "ahead = set(sys.modules)\n"
    late = (
        "worker",
        "shard",
        "prototype_measurement",
        "relabel",
        "generators.text_models",
        "generators.dit",
    )
    script += "".join(f"import semix.pipeline.{name}\n" for name in late)
    script += "print(sorted({m.split('.')[0] for m in set(sys.modules) - ahead}))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.stdout.strip() == "['semix']", completed.stderr


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_workers_share_the_cores_that_we_may_use():
    """A job may use one core of a large machine."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from semix.flows.slots import shared_threads; print(shared_threads(1))"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", code]
    completed = subprocess.run(
        command, env=environment, cwd=CHECKOUT, capture_output=True, text=True
    )
    assert completed.stdout.strip() == "{'OMP_NUM_THREADS': '1'}", completed.stderr
