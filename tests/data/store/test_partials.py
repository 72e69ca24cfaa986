"""Names of files that are being written say who writes them."""

import os
import socket
from pathlib import Path

import pytest

from data.machine import machine
from data.store.local import WRITTEN_WITHIN_S, abandoned, in_use, staged, written_here

GONE = 2**22 + 1  # above the highest process number


@pytest.mark.parametrize("host", ["b", "a.b", "a-b.c-1.example", "7.8.abc", "x" * 64])
@pytest.mark.parametrize("name", ["clock", "0000001-0123abcd.features.safetensors", "a.b-1.2.3"])
def test_a_name_is_read_back(tmp_path, monkeypatch, host, name):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    with staged(tmp_path, name) as partial:
        assert len(partial.name) < 255
        assert written_here(partial)
        assert in_use(partial, age_s=0.0)
        assert not in_use(partial, age_s=WRITTEN_WITHIN_S)
        for other in ("a.b.b", "c", "1.example"):
            monkeypatch.setattr(socket, "gethostname", lambda other=other: other)
            assert not written_here(partial)
        monkeypatch.setattr(socket, "gethostname", lambda: host)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        (".x.tar.{machine}.{pid}.abc.partial", True),
        (".x.tar.{machine}.{gone}.abc.partial", True),
        (".x.tar.{host}.{pid}.abc.partial", False),  # as they were named once
        (".x.tar.{machine}.pid.abc.partial", False),
        (".x.tar.{machine}.99999999999999999999.abc.partial", False),
        (".{machine}.{pid}.abc.partial", False),
        (".x.partial", False),
        (".partial", False),
    ],
)
def test_names_that_others_may_have_given(name, here):
    values = {"machine": machine(), "host": socket.gethostname(), "pid": os.getpid(), "gone": GONE}
    assert written_here(Path(name.format_map(values))) == here
    assert in_use(Path(name.format_map(values)), age_s=0.0) == (here and "{pid}" in name)


def test_of_other_machines_age_tells_and_of_other_programs_nothing():
    ours, another, foreign = (
        Path(f".x.{machine()}.{GONE}.abc.partial"),
        Path(".x.host-0123456789ab.1.abc.partial"),
        Path(".x.host.1.abc.partial"),
    )
    old = WRITTEN_WITHIN_S + 1
    assert [abandoned(path, age_s=0.0) for path in (ours, another, foreign)] == [True, False, False]
    assert [abandoned(path, age_s=old) for path in (ours, another, foreign)] == [True, True, False]
