"""Sparse files of a terabyte, which cost an attacker nothing.

None is read into memory; the error names the file and the most that is read of its kind.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from semix.calib.checkpoint import Checkpoint, load_tensors, read_metadata, save_checkpoint
from semix.calib.results import load_evaluation
from semix.calib.run_folder import is_run, mixed_pin, require_trained
from semix.data.errors import InputError, TooLarge
from semix.data.exclusion import newest_flags
from semix.data.formats import PLAN, PROTOTYPES, record_name
from semix.data.label_sets import LabelSet
from semix.data.layout import extension_name
from semix.data.leases import claim, lease_name, living
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.settings import read_config_file
from semix.data.shard_files import ShardCache
from semix.data.verify import damage
from tests.calib.measured import make_run
from tests.command import semix
from tests.data.whole_roots import failure, whole_root
from tests.handmade import committed, label_set, labels_of

SIZE = 2**40
NAMED = r"1,099,511,627,776 bytes: at most [\d,]+ bytes of it are read; restore it from a copy"


def giant(path: Path | str) -> Path:
    """Replace a file by one of SIZE bytes that takes no block of the disk."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("wb") as file:
        file.truncate(SIZE)
    return Path(path)


@pytest.fixture
def root(tmp_path) -> Root:
    return whole_root(tmp_path / "root")


def put_giant(root: Root, name: str) -> str:
    giant(Path(root.url, name))
    return name


@pytest.mark.parametrize("name", [PLAN, extension_name(1)])
def test_a_plan_and_an_extension(root, name):
    put_giant(root, name)
    with pytest.raises(InputError, match=rf"{name} = {NAMED}"):
        Root(root.url)
    status, _, err = semix("status", root.url)
    assert status == 2 and "at most" in err and "not your input" not in err


def test_an_index(root):
    name = put_giant(root, "index/0.json")
    with pytest.raises(InputError, match=rf"{name} = {NAMED}"):
        PinnedRoot(root)
    assert Root(root.url).done() == [0, 1, 2]
    assert any(name in p.text and "at most" in p.text for p in damage(Root(root.url)))


def test_a_commit_record_is_named_and_can_be_discarded(root):
    name = put_giant(root, record_name(1))
    reopened = Root(root.url)
    with pytest.raises(ValueError, match=rf"{name}.*{NAMED}"):
        reopened.record(1)
    assert any("1099511627776 bytes" in p.text for p in damage(reopened))
    reopened.discard(1, why="too large")
    assert not Path(root.url, record_name(1)).exists()


def test_a_failure_stands_for_its_shard_with_what_is_wrong_with_it(root):
    root.discard(1)
    root.record_failure(failure(1))
    (path,) = Path(root.url, "failed").rglob("*.json")
    giant(path)
    ((shard, (entry,)),) = Root(root.url).failures().items()
    assert shard == 1 and path.name in entry.message and "at most 1,048,576 bytes" in entry.message


def test_a_lease_of_nobody_holds_nothing_up(root):
    put_giant(root, lease_name(1))
    assert living(root.store) == set()
    assert claim(root.store, 1)


def test_an_audit(root):
    name = put_giant(root, "audit/0.json")
    with pytest.raises(ValueError, match=rf"{name}.*{NAMED}"):
        newest_flags(root, "index/0.json")


def test_prototypes(root):
    put_giant(root, PROTOTYPES)
    assert any(PROTOTYPES in p.text and "at most" in p.text for p in damage(root))
    with pytest.raises(TooLarge, match=rf"{PROTOTYPES} = {NAMED}"):
        _ = PinnedRoot(root).prototypes


def test_features(root):
    (entry, *_) = root.records()
    put_giant(root, entry.features.name)
    with pytest.raises(ValueError, match=rf"{entry.features.name} = .* bytes: at most 112 bytes"):
        PinnedRoot(root).features(entry)
    assert [p.files for p in damage(Root(root.url), full=True)] == [(entry.features.name,)]


def test_a_label_set_and_its_labels(root):
    labels = label_set(root)
    for shard, entry in committed(root).items():
        labels.commit(
            shard, images=entry.sha256, groups=[labels_of(group) for group in entry.group_numbers]
        )
    put_giant(root, labels.name(1))
    reopened = LabelSet(Root(root.url), labels.digest)
    with pytest.raises(ValueError, match=rf"{labels.name(1)}.*{NAMED}"):
        reopened.labels(1)
    put_giant(root, f"labels/{labels.digest}/set.json")
    with pytest.raises(ValueError, match=rf"set\.json.*{NAMED}"):
        LabelSet(Root(root.url), labels.digest)
    assert any("set.json" in p.text and "at most" in p.text for p in damage(Root(root.url)))


def test_a_note_of_the_cache_is_made_again(root, tmp_path):
    cache = ShardCache(tmp_path / "cache")
    (entry, *_) = root.records()
    giant(tmp_path / "cache" / "contents" / f"{entry.sha256}.json")
    assert cache.read_manifest(entry) is None


def test_a_config(tmp_path):
    path = giant(tmp_path / "config.yaml")
    with pytest.raises(InputError, match=r"^config = .*: at most 16,777,216 bytes of it are read"):
        read_config_file(str(path))


# Run folders

READERS: dict[str, Callable[[Path], object]] = {
    "config.json": require_trained,
    "evaluation.json": load_evaluation,
    "data.json": mixed_pin,
}


@pytest.mark.parametrize("name", READERS)
def test_the_json_of_a_run(tmp_path, name):
    run = make_run(tmp_path / "run", "CE", [{}])
    (run / "seed-0").mkdir(exist_ok=True)
    giant(run / name)
    with pytest.raises(TooLarge, match=rf"{name} = {NAMED}"):
        READERS[name](run)
    if name == "config.json":
        assert not is_run(run)


@pytest.mark.parametrize("read", [load_tensors, read_metadata])
def test_the_tensors_of_a_run(tmp_path, read):
    path = giant(tmp_path / "model.safetensors")
    with pytest.raises(TooLarge, match=rf"model\.safetensors = {NAMED}"):
        read(path)


@pytest.mark.parametrize("name", ["state.json", "objects.json", "objects.safetensors"])
def test_a_checkpoint(tmp_path, name):
    path = save_checkpoint(tmp_path, 1, tensors={}, objects={"a": 1}, state={"position": 1})
    giant(path / name)
    with pytest.raises(InputError, match=rf"{name}"):
        Checkpoint(path).objects()
