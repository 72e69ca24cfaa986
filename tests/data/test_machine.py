"""One process number means one process where `machine()` is the same."""

import re
import socket
import subprocess
import sys

import pytest

from data.machine import machine

SCRIPT = "from data.machine import machine; print(machine())"


@pytest.mark.process
def test_processes_that_see_each_other_are_of_one_machine():
    command = [sys.executable, "-c", SCRIPT]
    assert subprocess.check_output(command, text=True).strip() == machine()


def test_it_begins_with_the_hosts_name(monkeypatch):
    for host in ("node-7.cluster", "x" * 64):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert re.fullmatch(rf"{re.escape(host)}-[0-9a-f]{{12}}", machine())


@pytest.mark.process
def test_a_container_with_its_hosts_name_is_another_machine(in_a_container):
    found = in_a_container(f"import socket; print(socket.gethostname()); {SCRIPT}").split()
    assert found[0] == socket.gethostname()
    assert found[1] != machine()
