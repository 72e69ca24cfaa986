"""Chosen noises in the root: stored once, read by all."""

import json
import os

import pytest
import torch

from data.errors import InputError
from data.leases import TIME_TO_LIVE, Renewing, living
from data.machine import machine
from data.store import Store
from pipeline.noise import initial_noise
from pipeline.noise.bank import CACHED, Bank, Part, noise_digest, packed, part_name, unpacked

SHAPE = (4, 2, 2)


def selected(number: int | None = 3) -> Part:
    entries = [{"seed": 5 + (number or 0), "stability": 0.5}, {"seed": 9, "stability": 0.25}]
    return Part({"common": {"strategy": "select"}, "entries": entries, "number": number})


def optimised() -> Part:
    facts = {"common": {"strategy": "optimise"}, "entries": [{"seed": None, "stability": 0.9}]}
    return Part(facts, initial_noise([1], SHAPE).half())


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def test_what_is_packed_comes_back():
    part, plan = unpacked(packed(selected(), "abc"))
    assert (part, plan, len(part)) == (selected(), "abc", 2)
    assert part.record(1) == {"strategy": "select", "seed": 9, "stability": 0.25}
    assert torch.equal(part.noise(1, SHAPE), initial_noise([9], SHAPE)[0])
    assert packed(part, plan) == packed(selected(), "abc")


def test_optimised_noise_comes_back_as_it_was_rounded():
    part, _ = unpacked(packed(optimised(), "abc"))
    noise = part.noise(0, SHAPE)
    assert noise.dtype == torch.float32
    assert torch.equal(noise, initial_noise([1], SHAPE)[0].half().float())
    assert noise_digest(noise) != noise_digest(initial_noise([1], SHAPE)[0])


def test_a_part_is_chosen_once_and_then_read(store):
    chosen = []

    def choose(number):
        chosen.append(number)
        return selected(number)

    first, second = (Bank(store, "abc", choose=choose) for _ in range(2))
    for bank in (first, second):
        assert bank.part(7).record(0)["seed"] == 12
        assert bank.part(None).record(0)["seed"] == 5
    assert chosen == [7, None]
    assert store.list("noise") == ["noise/0000/0000007.safetensors", "noise/run.safetensors"]
    assert store.list("leases") == []


def test_what_is_stored_decides(store):
    """Another worker published between our look and our claim, or won the create."""

    def choose(number):
        store.create(part_name(number), packed(optimised(), "abc"))
        return selected(number)

    assert Bank(store, "abc", choose=choose).part(3).record(0)["strategy"] == "optimise"


def test_a_part_that_another_process_is_choosing_is_waited_for(store, monkeypatch):
    monkeypatch.setattr("pipeline.noise.bank.WAIT", 0.001)
    note = {"host": machine(), "pid": os.getppid(), "time": 0}
    store.put("leases/noise-0000-0000003.json", json.dumps(note).encode())
    beats = []

    def beat():
        beats.append(1)
        if len(beats) == 3:
            store.create(part_name(3), packed(optimised(), "abc"))

    bank = Bank(store, "abc", choose=selected, beat=Renewing(store, beat))
    assert bank.part(3).record(0)["strategy"] == "optimise"
    assert len(beats) == 3


def test_a_choice_that_takes_long_stays_ours(store, monkeypatch):
    monkeypatch.setattr("data.leases.RENEW_EVERY_S", 0.0)
    beat, held = Renewing(store), []

    def choose(number):
        when = store.now() - TIME_TO_LIVE - 60
        os.utime(f"{store.url}/leases/noise-run.json", (when, when))
        assert living(store) == set()
        beat()
        held.append(living(store))
        return selected(number)

    Bank(store, "abc", choose=choose, beat=beat).part(None)
    assert held == [{"leases/noise-run.json"}]
    assert store.list("leases") == []


def test_the_lease_of_a_dead_process_is_taken_over(store):
    note = {"host": machine(), "pid": 2**22 + 1, "time": 0}
    store.put("leases/noise-run.json", json.dumps(note).encode())
    assert Bank(store, "abc", choose=selected).part(None) == selected(None)
    assert store.list("leases") == []


def test_a_failed_choice_leaves_nothing_behind(store):
    def choose(number):
        raise FloatingPointError("pair 3: no score")

    with pytest.raises(FloatingPointError, match="pair 3"):
        Bank(store, "abc", choose=choose).part(3)
    assert store.list("") == []


def test_foreign_and_damaged_parts_are_named(store):
    store.put(part_name(1), packed(selected(), "f" * 64))
    store.put(part_name(2), packed(selected(), "abc")[:40])
    bank = Bank(store, "abc", choose=selected)
    with pytest.raises(InputError, match=r"0000001\.safetensors = of plan ffffffffffff: remove it"):
        bank.part(1)
    with pytest.raises(InputError, match=r"0000002\.safetensors = damaged: remove it, and the"):
        bank.part(2)


def test_memory_does_not_grow_with_the_pairs(store):
    bank = Bank(store, "abc", choose=selected)
    for number in range(CACHED + 10):
        bank.part(number)
    assert bank.part.cache_info().currsize == CACHED
