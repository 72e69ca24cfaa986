"""What a root does, on stores that are no local folder."""

import secrets

import pytest

from data.garbage import garbage, remove
from data.leases import claim, release
from data.repair import put_aside
from data.root import Root
from data.store import Store
from tests.data.whole_roots import Counting, whole_root


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.process)])
def url(request):
    if request.param == "s3":
        return request.getfixturevalue("bucket") + "/some/root"
    return f"memory://{secrets.token_hex(4)}"


def test_damage_is_found_put_aside_and_made_again(url):
    root = whole_root(url, shards=4)
    assert root.verify(full=True) == []
    entry, whole = root.committed()[1], {}
    for shard in (0, 1):
        name = root.committed()[shard]["tar"]
        whole[name] = root.store.get(name)
        root.store.put(name, whole[name][:700] + b"?" + whole[name][701:])
    root.store.delete(root.committed()[2]["tar"])
    watching = Root(url)
    assert put_aside(watching, watching.verify(full=True)) == 3
    assert watching.missing() == Root(url).missing() == [0, 1, 2]
    root.store.put(entry["tar"], whole[entry["tar"]])
    record = {k: v for k, v in entry.items() if k not in ("record_bytes", "discards")}
    assert root.commit({**record, "spec": root.record(3)["spec"]})
    assert Root(url).missing() == [0, 1, 2]  # the record of another shard does not count
    assert claim(root.store, 1)
    release(root.store, 1)
    assert root.store.list("leases") == []


def test_garbage_is_found_and_removed(url):
    root = whole_root(url)
    root.store.put("shards/0000/0000001-0123abcd.tar", b"1234")
    assert garbage(root) == []
    (item,) = garbage(root, older_than_s=-60)
    assert remove(root, [item], older_than_s=-60) == [item]
    assert garbage(root, older_than_s=-60) == []
    assert root.verify(full=True) == []


def test_requests_do_not_grow_with_the_records_that_an_index_knows(url):
    root = whole_root(url, shards=5)
    again = Root(url)
    store = Counting(Store(url))
    again._records._store = store
    assert again.missing() == []
    assert store.calls == {"scan": 4, "get": 1}  # folders, tombstones, indices, one folder
    assert again.missing() == []
    assert store.calls == {"scan": 5, "get": 1}  # tombstones
    assert len(again.committed()) == 5
    assert store.calls["get"] == 2
    assert root.write_index() == "index/0.json"
