"""Prototypes and pairs of a root: one worker measures, and all shards are made with them."""

import json
import os
from itertools import combinations

import pytest

from semix.data.errors import InputError
from semix.data.formats import PAIRS, PROTOTYPES, Pairs, record_name
from semix.data.machine import machine
from semix.data.root import Root
from semix.data.verify import damage
from semix.flows.build_steps import quarantine_damage
from semix.pipeline.prototypes import ensure_prototypes, prepare, read_prototypes
from semix.pipeline.root import create_root
from tests.command import semix
from tests.pipeline.roots import begun, contents, made, samples, work


def lease_of(pid: int) -> bytes:
    """The lease of a process of this machine."""
    return json.dumps({"host": machine(), "pid": pid}).encode()


def test_one_worker_measures_and_the_others_wait(make_config, hasty_standins, tmp_path):
    similar = "mixing.pairs={kind: similar, count: 3}"
    root = create_root(make_config(hasty_standins, similar), str(tmp_path / "mixed"))
    root.store.put("leases/prototypes.json", lease_of(os.getppid()))
    listings = []

    def other_process():
        listings.append(sorted(root.store.list("")))
        ensure_prototypes(root, device="cpu")

    prepare(root, device="cpu", heartbeat=other_process)
    assert len(listings) == 1 and PROTOTYPES not in listings[0]
    assert len(json.loads(root.store.get("pairs.json"))) == 3
    assert root.store.get("leases/prototypes.json") == lease_of(os.getppid())


def test_a_worker_takes_over_from_one_that_died_while_it_measured(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "mixed"))
    root.store.put("leases/prototypes.json", lease_of(2**22 + 1))  # no process id of Linux
    prepare(root, device="cpu")
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
        prepare(root, device="cpu")
    assert listings == [["leases/prototypes.json"]]
    assert root.store.list("leases") == []


def test_prototypes_measured_again_must_be_those_that_shards_carry(root):
    content = root.store.get(PROTOTYPES)
    root.store.delete(PROTOTYPES)
    prepare(root, device="cpu")
    assert root.store.get(PROTOTYPES) == content
    root.store.delete(PROTOTYPES)
    record = root.record(0).model_copy(update={"prototypes": "0" * 64})
    root.store.put(record_name(0), record.written())
    with pytest.raises(InputError, match="are not those that 1 shards, 0 on, were made with"):
        prepare(Root(root.url), device="cpu")
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


def test_pairs_are_drawn_once_and_kept_in_the_root(similar):
    pairs = Pairs.read(similar.store.get(PAIRS))
    assert len(set(pairs)) == 5
    assert [tuple(s.record.classes) for s in samples(similar).values()] == pairs[:2]
    content = similar.store.get(PAIRS)
    similar.store.delete(PAIRS)
    ensure_prototypes(similar, device="cpu")
    assert similar.store.get(PAIRS) == content


def test_other_pairs_than_shards_were_made_with_are_refused_before_any_shard(similar, capsys):
    """The other pairs are valid and would be mixed without an error."""
    pairs = Pairs.read(similar.store.get(PAIRS))
    other = next(pair for pair in combinations(range(10), 2) if pair not in pairs)
    similar.store.put(PAIRS, json.dumps(sorted([*pairs[1:], other])).encode())
    before = contents(similar)
    assert work(similar) == 78
    stderr = capsys.readouterr().err
    assert f"{similar.url}/pairs.json = " in stderr
    assert "are not those that 1 shards, 0 on, were made with" in stderr
    assert contents(similar) == before


def test_damaged_pairs_are_named_by_a_worker_and_drawn_again_by_a_resume(similar, capsys):
    assert work(similar) == 0
    content = similar.store.get(PAIRS)
    similar.store.put(PAIRS, content[:-3])
    similar.discard(2)
    assert work(similar) == 78
    assert "pairs.json = damaged: cannot be read" in capsys.readouterr().err
    quarantine_damage(Root(similar.url))
    assert work(similar) == 0
    assert similar.store.get(PAIRS) == content
    similar.store.put(PAIRS, content[:-3])  # where nothing else is left to do
    status, _, stderr = semix("resume", similar.url)
    assert status == 0, stderr
    assert similar.store.get(PAIRS) == content
    assert damage(Root(similar.url), full=True) == []


@pytest.mark.process
def test_a_resume_over_damaged_pairs_goes_on_with_the_same_ones(similar, prefect_api):
    content = similar.store.get(PAIRS)
    similar.store.put(PAIRS, content[:-3])
    status, _, stderr = semix("resume", similar.url)
    assert status == 0, stderr
    assert similar.store.get(PAIRS) == content
    assert similar.missing() == []
