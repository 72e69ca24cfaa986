"""Losses of a whole batch: two processes train as one that has the whole batch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.losses.base import all_rows
from tests.calib.losses.small_training import LOSSES, trained

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, for every loss."""
    place = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "tests.calib.losses.small_training"]
    workers = [
        subprocess.Popen([*command, str(process), "2", str(place)], cwd=ROOT)
        for process in range(2)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    return [torch.load(place / f"{process}.pt") for process in range(2)]


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_train_as_one(name: str, two_processes: list[dict[str, Any]]):
    alone = trained(name)
    for found in two_processes:
        torch.testing.assert_close(found[name], alone, rtol=1e-5, atol=1e-6)
    # The state is the same to the bit, so that it cannot drift apart.
    first, second = (found[name]["state"] for found in two_processes)
    torch.testing.assert_close(dict(first), dict(second), rtol=0, atol=0)


def test_a_process_alone_keeps_its_rows():
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    assert all_rows(rows, training=True) is rows
