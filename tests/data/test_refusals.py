"""Files that are neither damaged nor missing: the store refuses, or a newer version wrote them.

The error is raised unchanged, and nothing counts as lost, is overwritten or is removed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion, newest_flags, store_flags
from semix.data.formats import FLAGS, SeriesFlags, record_name
from semix.data.garbage import garbage
from semix.data.label_sets import LabelSet
from semix.data.layout import next_extension, write_extension
from semix.data.leases import claim, forgotten, lease_name, living, release, renew
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter
from semix.data.store import Store
from semix.data.store.local import LocalFiles
from semix.data.verify import Problem, damage, quarantine
from tests.data.whole_roots import whole_root
from tests.handmade import LABELS_DIGEST, committed, label_set, labels_of

INDEX = "index/0.json"


@pytest.fixture(scope="module")
def labelled_root(tmp_path_factory) -> Root:
    """Three shards, labelled and audited; three more were added; another machine makes shard 1."""
    root = whole_root(tmp_path_factory.mktemp("made") / "root")
    labels = label_set(root)
    for shard, entry in committed(root).items():
        groups = [labels_of(group) for group in entry.group_numbers]
        labels.commit(shard, images=entry.sha256, groups=groups)
    store_audit(root.url)
    added = next_extension(root.plan.digest, root.layout, 6, groups_per_pair=2)
    write_extension(root.store, 1, added)
    root.store.create(lease_name(1), b'{"host": "another-machine", "pid": 1}')
    return root


@pytest.fixture
def url(labelled_root, tmp_path) -> str:
    """A copy that may be changed."""
    return shutil.copytree(labelled_root.url, tmp_path / "root").as_posix()


def labels_at(url: str) -> LabelSet:
    return LabelSet(Root(url), LABELS_DIGEST)


def label_again(url: str) -> bool:
    labels = labels_at(url)
    groups = [labels_of(group) for group in (2, 3)]
    return labels.commit(1, images=labels.root.record(1).sha256, groups=groups)


def store_audit(url: str) -> str:
    source, flags = PinnedRoot(Root(url)), {flag: [] for flag in FLAGS}
    audit = SeriesFlags(index=INDEX, digest=source.digest, labels=None, flags=flags)
    return store_flags(source.root, audit)


# By file: the functions that read it.
READERS: dict[str, list[Callable[[str], object]]] = {
    "plan.json": [Root, MixedDataset],
    "extensions/1.json": [Root],
    "prototypes.safetensors": [lambda url: damage(Root(url))],
    record_name(1): [
        lambda url: committed(Root(url)),
        lambda url: Root(url).totals(),
        lambda url: Root(url).record(1),
        lambda url: Root(url).write_index(),
        lambda url: damage(Root(url)),
        lambda url: quarantine(Root(url), damage(Root(url), full=True)),
        lambda url: garbage(Root(url)),
    ],
    INDEX: [
        lambda url: quarantine(Root(url), damage(Root(url))),
        lambda url: garbage(Root(url)),
        lambda url: PinnedRoot(Root(url)),
        MixedDataset,
    ],
    lease_name(1): [
        lambda url: claim(Store(url), 1),
        lambda url: renew(Store(url), 1),
        lambda url: release(Store(url), 1),
        lambda url: living(Store(url)),
        lambda url: forgotten(Store(url)),
        lambda url: quarantine(Root(url), [Problem(1, "cut")]),
        lambda url: garbage(Root(url)),
    ],
    f"labels/{LABELS_DIGEST}/set.json": [
        labels_at,
        lambda url: label_set(Root(url)),
        lambda url: damage(Root(url)),
        lambda url: garbage(Root(url)),
        lambda url: MixedDataset(url, labels=LABELS_DIGEST),
    ],
    record_name(1, f"labels/{LABELS_DIGEST}"): [
        lambda url: labels_at(url).labels(1),
        lambda url: labels_at(url).is_labelled(1),
        label_again,
        lambda url: quarantine(Root(url), damage(Root(url), full=True)),
        lambda url: garbage(Root(url)),
        lambda url: MixedDataset(url, labels=LABELS_DIGEST),
    ],
    "audit/0.json": [
        lambda url: newest_flags(Root(url), INDEX),
        lambda url: SeriesFilter(Exclusion(flagged=("still",)), PinnedRoot(Root(url))),
        store_audit,
    ],
}


def everything(url: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(url).rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "error",
    [
        InputError("url", "s3://x", "refused: the clock of this machine is wrong"),
        ConnectionError("no answer: ReadTimeoutError"),
    ],
    ids=["refused", "silent"],
)
def test_what_a_store_refuses_is_neither_damaged_nor_missing(url, name, error, monkeypatch):
    before, get = everything(url), LocalFiles.get

    def refusing(self, requested, max_bytes):
        if requested == name:
            raise error
        return get(self, requested, max_bytes)

    monkeypatch.setattr(LocalFiles, "get", refusing)
    for read in READERS[name]:
        with pytest.raises(type(error)) as caught:
            read(url)
        assert caught.value is error
        assert everything(url) == before


def newer(content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"schema": 7, "of a newer version": [1]}).encode()


def newer_entries(index: bytes) -> bytes:
    return index.replace(b'"shard":', b'"of a newer version":[1],"schema":7,"shard":')


def newer_head(index: bytes) -> bytes:
    return index.replace(b'{"plan"', b'{"of a newer version":[1],"schema":7,"plan"')


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((n, newer) for n in READERS if n not in ("prototypes.safetensors", "plan.json", INDEX)),
        *((INDEX, change) for change in (newer_entries, newer_head)),
    ],
)
def test_what_a_newer_version_wrote_is_refused_by_name_and_left_alone(url, name, change):
    path = Path(url, name)
    path.write_bytes(change(path.read_bytes()))
    before = everything(url)
    for read in READERS[name]:
        message = f"^{path} schema = 7: a newer version of semix wrote it, this one reads 1; use"
        with pytest.raises(InputError, match=message):
            read(url)
        assert everything(url) == before


def test_the_same_files_read_well_as_this_version_writes_them(url):
    """Without this the tests above would show little."""
    for readers in READERS.values():
        for read in readers:
            read(url)


@pytest.mark.parametrize("name", ["plan.json", record_name(1), INDEX, "extensions/1.json"])
def test_a_wrong_clock_of_a_real_store_is_named(bucket, faulty_s3, name):
    root = whole_root(f"{bucket}/root")
    added = next_extension(root.plan.digest, root.layout, 6, groups_per_pair=2)
    write_extension(root.store, 1, added)
    code = "RequestTimeTooSkewed"
    faulty_s3.fail(errors=1.0, statuses=[403], code=code, methods=["GET"], path=f"root/{name}")
    for read in (lambda url: damage(Root(url)), lambda url: damage(Root(url), full=True)):
        with pytest.raises(InputError, match="the clock of this machine is wrong"):
            read(root.url)
    faulty_s3.heal()
    assert Root(root.url).missing() == [3, 4, 5]
