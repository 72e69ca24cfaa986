"""Prototypes and pairs of a root: one worker measures, and all shards are made with them."""

import json
import os
from itertools import combinations

import pytest

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES, record_name
from semix.data.machine import machine
from semix.data.root import Root
from semix.data.store import Store
from semix.data.verify import damage
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes, prepare, read_prototypes
from tests.pipeline.roots import begun, create_root, made, samples, work


def lease_of(pid: int) -> bytes:
    """The lease of a process of this machine."""
    return json.dumps({"host": machine(), "pid": pid}).encode()


def test_one_worker_measures_and_the_others_wait(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "mixed"))
    root.store.put("leases/prototypes.json", lease_of(os.getppid()))
    listings = []

    def other_process():
        listings.append(sorted(root.store.list("")))
        ensure_prototypes(build_of(root), device="cpu")

    content = prepare(build_of(root), device="cpu", heartbeat=other_process)
    assert content == root.store.get(PROTOTYPES)
    assert len(listings) == 1 and PROTOTYPES not in listings[0]
    assert root.store.get("leases/prototypes.json") == lease_of(os.getppid())


def test_a_worker_takes_over_from_one_that_died_while_it_measured(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "mixed"))
    root.store.put("leases/prototypes.json", lease_of(2**22 + 1))  # no process id of Linux
    prepare(build_of(root), device="cpu")
    assert root.store.exists(PROTOTYPES)
    assert root.store.list("leases") == []


def test_who_measures_holds_a_lease_until_all_is_there(hasty_config, tmp_path, monkeypatch):
    root = create_root(hasty_config, str(tmp_path / "mixed"))
    listings = []

    def fails(*_, **__):
        listings.append(root.store.list("leases"))
        raise InputError("real", "class '3'", "has no training images")

    monkeypatch.setattr("semix.pipeline.prototypes.measure", fails)
    with pytest.raises(InputError, match="class '3': has no training images"):
        prepare(build_of(root), device="cpu")
    assert listings == [["leases/prototypes.json"]]
    assert root.store.list("leases") == []


def test_prototypes_measured_again_must_be_those_that_shards_carry(root):
    content = root.store.get(PROTOTYPES)
    root.store.delete(PROTOTYPES)
    prepare(build_of(root), device="cpu")
    assert root.store.get(PROTOTYPES) == content
    root.store.delete(PROTOTYPES)
    record = root.record(0).model_copy(update={"prototypes": "0" * 64})
    root.store.put(record_name(0), record.written())
    with pytest.raises(InputError, match="are not those that shard 0 was made with"):
        prepare(build_of(Root(root.url)), device="cpu")
    assert not root.store.exists(PROTOTYPES)


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: c[:-9] + b"!" + c[-8:]])
def test_damaged_prototypes_are_refused(hasty_config, tmp_path, damage):
    root = begun(hasty_config, tmp_path / "root")
    root.store.put(PROTOTYPES, damage(root.store.get(PROTOTYPES)))
    with pytest.raises(
        ValueError, match=r"not a complete safetensors file|damaged: does not have the SHA"
    ):
        read_prototypes(root)


SIMILAR = ("mixing.pairs={kind: similar, count: 5}", "shards.groups_per_shard=2")


@pytest.fixture
def similar(make_config, hasty_standins, tmp_path) -> Root:
    """The first of three shards over five pairs that were drawn by similarity."""
    return made(make_config(hasty_standins, *SIMILAR), tmp_path / "similar", "--shards", "0")


def test_pairs_are_drawn_once_and_stand_in_the_plan(similar):
    pairs = similar.plan.pairs
    assert len(set(pairs)) == 5
    assert [tuple(s.record.classes) for s in samples(similar).values()] == pairs[:2]
    before = similar.store.get("plan.json")
    similar.store.delete(PROTOTYPES)
    assert work(similar) == 0
    assert similar.store.get("plan.json") == before
    assert damage(Root(similar.url), full=True) == []


def test_a_start_that_is_killed_while_it_measures_goes_on(
    make_config, hasty_standins, tmp_path, monkeypatch
):
    """What it leaves below the place of the root is taken up and removed."""
    config, url = make_config(hasty_standins, *SIMILAR), str(tmp_path / "similar")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setenv("SEMIX_CACHE", str(tmp_path / "cache"))
        patched.setattr("semix.pipeline.root.drawn_pairs", killed)
        create_root(config, url)
    assert {name.split("/")[0] for name in Store(url).list("")} == {"prototypes"}
    root = create_root(config, url)
    assert len(root.plan.pairs) == 5
    assert sorted(root.store.list("")) == ["plan.json", PROTOTYPES]


def test_pairs_of_a_plan_are_part_of_its_identity(similar):
    plan = json.loads(similar.store.get("plan.json"))
    other = next(list(p) for p in combinations(range(10), 2) if list(p) not in plan["pairs"])
    plan["pairs"] = sorted([*plan["pairs"][1:], other])
    similar.store.put("plan.json", json.dumps(plan).encode())
    with pytest.raises(InputError, match=r"plan\.json digest = .*plan\.json was changed"):
        build_of(Root(similar.url))
