"""What only Google's storage does; test_store.py holds for it too."""

import os

import pytest

from data.errors import InputError
from data.store import Store


def test_a_large_file_goes_up_in_chunks(gs_bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("data.store.objects.PART", 4 << 20)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(9 << 20))
    store = Store(f"{gs_bucket}/root")
    for _ in range(2):  # the second finds it there
        store.publish(large, "x.tar")
        assert store.get("x.tar") == large.read_bytes()
    with store.open("x.tar") as file:
        file.seek(5 << 20)
        assert file.read() == large.read_bytes()[5 << 20 :]
    assert (store.partials(), store.sweep()) == ({}, 0)


def test_more_objects_than_a_page_holds_are_listed(gs_bucket):
    store = Store(f"{gs_bucket}/root")
    names = [f"shards/0000/{number:07d}.json" for number in range(130)]
    for name in names:
        store.put(name, b"1")
    assert store.list("shards") == names


def test_a_missing_bucket_is_named(gs_bucket):
    with pytest.raises(InputError, match=r"out = gs://none-such/root: there is no such bucket"):
        Store("gs://none-such/root").check_writable()


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="no valid credentials; set GOOGLE_APPLICATION_CREDEN"):
        Store("gs://none-such/root").exists("plan.json")
