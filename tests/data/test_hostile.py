"""Known attacks on readers of shards, tried on ours; random damage."""

import hashlib
import json
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_arrays
from safetensors.torch import save

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.formats import record_name, shard_stem
from semix.data.images import decode_image
from semix.data.root import DamagedShards, Root
from semix.data.tar import read_shard
from semix.data.tensors import read_arrays, read_tensors
from semix.data.verify import damage
from tests.data import hostile
from tests.fuzz.mutations import blindly, mutate
from tests.fuzz.targets import attempt, targets
from tests.handmade import committed, make_root, pixels, record, sample, tar_of

ROOT = Path(__file__).parents[2]
# Reads every file of a folder under a hook that ends the process at the first thing that reading
# must never do. `control` shows that the hook sees it.
READER = """
import io, json, os, pickle, sys
from pathlib import Path
import torch
from semix.data.formats import CommitRecord, ShardLabels
from semix.data.images import decode_image, encode_image
from semix.data.index import read_index
from semix.data.tar import read_tar, scan_tar
from semix.data.tensors import read_arrays, read_tensors
from tests.handmade import sample, tar_of

folder, control = Path(sys.argv[1]), sys.argv[2:]
contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
names = {path.name: path.read_text() for path in (folder.parent / "names").iterdir()}
EVENTS = ("exec", "compile", "import", "pickle.", "os.", "subprocess.", "socket.", "shutil.",
          "ctypes.", "marshal.", "code.", "glob.", "tempfile.", "webbrowser.", "urllib.", "open")

def watch(event, arguments):
    if event.startswith(EVENTS) and armed:
        os.write(2, f"{event} {arguments!r}"[:300].encode())
        os._exit(99)

def images(content):
    for sample in read_tar(io.BytesIO(content)):
        for image in sample.images:
            decode_image(image)

def tried(read, content):
    try:
        read(content)
    except ValueError as error:
        return str(error)
    return None

readers = [images, lambda content: list(scan_tar(io.BytesIO(content))), decode_image,
           CommitRecord.read, ShardLabels.read, read_index,
           lambda content: read_tensors(content, where="x")]
armed = False
for extension in ("webp", "png", "jpg"):  # lets Pillow load its readers
    images(tar_of(sample(1, extension=extension)))
for read in readers:
    tried(read, b"{")
sys.addaudithook(watch)
armed = True
if control:
    pickle.loads(next(contents[n] for n in contents if names[n] == "tensors: pickle"))
found = {names[name]: [tried(read, content) for read in readers]
         for name, content in contents.items()}
armed = False
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def canary(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("canary") / "CANARY"


@pytest.fixture(scope="module")
def shards(canary) -> dict[str, bytes]:
    return {
        **hostile.pickles(canary),
        **hostile.archives(),
        **hostile.series(),
        **hostile.images(),
    }


@pytest.fixture(scope="module")
def watched(shards, canary, tmp_path_factory):
    """watched(*arguments): a process that reads all hostile shards and tensor files."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("files", "names"):
        (folder / name).mkdir()
    contents = {**shards, **{f"tensors: {n}": c for n, c in hostile.tensor_files(canary).items()}}
    for number, (name, content) in enumerate(contents.items()):
        (folder / "files" / f"{number:03d}").write_bytes(content)
        (folder / "names" / f"{number:03d}").write_text(name)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", READER, str(folder / "files"), *arguments]
        environment = {**os.environ, "GOPEN_REWRITE": "a=pipe:touch CANARY", "WDS_x": "$(touch x)"}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )

    return run


@pytest.mark.process
def test_a_hostile_shard_is_refused_and_nothing_executed(watched, shards, canary):
    completed = watched()
    assert (completed.returncode, completed.stderr) == (0, "")
    results = json.loads(completed.stdout)
    assert len(results) == len(shards) + len(hostile.tensor_files(canary))
    for name in shards:
        assert results[name][0], f"{name} was read"
    for name in hostile.tensor_files(canary):
        assert results[f"tensors: {name}"][-1].startswith("x: "), name
    assert not canary.exists()


@pytest.mark.process
def test_the_watch_and_the_payload_work(watched, tmp_path):
    """Without this the test above could not fail."""
    assert watched("control").returncode == 99
    (tmp_path / "a.tar").write_bytes(hostile.pickles(tmp_path / "CANARY")["pickle.pyd"])
    list(wds.WebDataset([str(tmp_path / "a.tar")], shardshuffle=False).decode())
    assert (tmp_path / "CANARY").exists()


def test_a_hostile_shard_is_refused_by_name(shards, tmp_path):
    root = make_root(tmp_path, shards=len(shards) + 1, groups=1, tars=list(shards.values()))
    problems = {p.shard: p.text for p in damage(root, full=True) if p.kind == "shard"}
    records = committed(root)
    assert sorted(problems) == list(range(len(shards)))
    for shard, text in problems.items():
        assert records[shard].tar in text
    for shard, entry in records.items():
        with pytest.raises(ValueError, match=entry.tar) if shard in problems else nullcontext():
            for series in read_shard(root.store, entry):
                for image in series.images:
                    try:
                        decode_image(image)
                    except ValueError as error:
                        raise ValueError(f"{entry.tar}: {error}") from None


@pytest.mark.parametrize(
    "kind", ["pickle.pyd", "gzip bomb", "symlink", "eight exabytes", "nested noise", "EPS"]
)
def test_a_training_run_refuses_it_by_name(shards, kind, tmp_path):
    root = make_root(tmp_path, shards=2, groups=1, tars=[shards[kind]])
    with pytest.raises(ValueError, match=committed(root)[0].tar):
        everything = MixedDataset(root.url)
        everything.draw(torch.tensor([0]), rng=torch.Generator())


def test_verify_reports_hostile_features_and_goes_on(canary, tmp_path):
    files = hostile.tensor_files(canary)
    root = make_root(tmp_path, shards=len(files) + 1, groups=1)
    for shard, content in enumerate(files.values()):
        committed = json.loads(root.store.get(record_name(shard)))
        digest = hashlib.sha256(content).hexdigest()
        name = f"{shard_stem(shard)}-{digest[:8]}.features.safetensors"
        committed["features"] = {"name": name, "sha256": digest, "bytes": len(content)}
        root.store.put(name, content)
        root.store.put(record_name(shard), json.dumps(committed).encode())
    texts = {p.shard: p.text for p in damage(Root(root.url), full=True) if p.kind == "shard"}
    assert sorted(texts) == list(range(len(files)))
    assert all(".features.safetensors" in text for text in texts.values())
    assert not canary.exists()


def test_verify_reports_hostile_prototypes(canary, tmp_path):
    root = make_root(tmp_path, shards=1, groups=1)
    deep = save({"prototypes": torch.zeros(3, 4)}, {"semix": "[" * 100_000})
    for content in (*hostile.tensor_files(canary).values(), deep):
        root.store.put("prototypes.safetensors", content)
        assert "prototypes" in {problem.kind for problem in damage(root, full=True)}
    assert not canary.exists()


@pytest.mark.parametrize(
    "url",
    [
        "pipe:touch CANARY",
        "pipe:touch CANARY |",
        "file://pipe:touch CANARY",
        "${WDS_x}",
        "{a,b}.tar",
        "tests/data",
        "http://127.0.0.1:9/x",
        "https://x@127.0.0.1:9/x",
        "hf://x/y",
        "github://a:b@/x",
        "zip://a.zip",
        "simplecache::file:///tmp",
        "file:///tmp::file:///tmp",
        "ftp://127.0.0.1/x",
        "ssh://127.0.0.1/x",
        "reference://x",
        "data://text",
        "",
    ],
)
def test_a_url_is_a_place_and_nothing_else(url, tmp_path, monkeypatch):
    monkeypatch.setenv("GOPEN_REWRITE", "http=pipe:touch CANARY ")
    monkeypatch.setenv("WDS_x", "$(touch CANARY)")
    monkeypatch.chdir(tmp_path)
    for opened in (Root, MixedDataset):
        with pytest.raises(InputError, match="url = "):
            opened(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "pipe:touch CANARY", "shards/0000", "plan.json"]
)
def test_records_that_point_elsewhere_are_refused(name, tmp_path):
    (tmp_path / "secret").write_bytes(tar_of(*(sample(g) for g in range(3))))
    root = make_root(tmp_path / "root")
    stored = json.loads(root.store.get("shards/0000/0000000.json"))
    root.store.put("shards/0000/0000000.json", json.dumps(stored | {"tar": name}).encode())
    index = root.store.get("index/0.json").replace(stored["tar"].encode(), name.encode())
    root.store.put("index/0.json", index)
    with pytest.raises(DamagedShards, match="tar is not shards/0000/0000000"):
        Root(root.url).write_index()
    with pytest.raises(ValueError, match="tar is not shards/0000/0000000"):
        MixedDataset(root.url)


@pytest.mark.parametrize("read", [read_tensors, read_arrays])
def test_tensor_files_read_back_and_are_refused_by_name(read, canary):
    for content in hostile.tensor_files(canary).values():
        with pytest.raises(ValueError, match=r"^shards/x\.features\.safetensors: "):
            read(content, where="shards/x.features.safetensors")
    content = save({"metadata": torch.ones(2, 3), "model_config": torch.zeros(0)}, {"a": "b"})
    tensors, metadata = read(content, where="x")
    assert metadata == {"a": "b"}
    np.testing.assert_array_equal(tensors["metadata"], np.ones((2, 3)))
    assert tensors["model_config"].shape == (0,)


INPUTS = 25_000
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}
TARGETS = targets()


def drive(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.fuzz.drive", *options]
    return subprocess.run(command, cwd=ROOT, env=ALONE, capture_output=True, text=True)


@pytest.mark.process
def test_many_thousand_mutated_files(tmp_path):
    """Within 512 MiB and two seconds per input; a failing process says which input it was."""
    note = tmp_path / "note"
    completed = drive("--inputs", str(INPUTS), "--note", str(note))
    assert completed.returncode == 0, f"{completed.stderr[-3000:]}\nat input {note.read_text()}"
    counts = json.loads(completed.stdout)
    assert sum(counts.values()) == INPUTS
    # Some changes do no harm; if all did, or none, this would test little.
    for kind in TARGETS:
        assert counts[f"{kind} read"] > 0, kind
        assert counts[f"{kind} refused"] > 500, kind


@pytest.mark.process
def test_the_drive_tells_which_input_it_was():
    """Without this the test above could not fail: here no input is quick enough."""
    completed = drive("--inputs", "40", "--longest", "0")
    assert completed.returncode == 1
    assert "--seed 0 --kind shard --only 0, " in completed.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*record(3), "mixture", "agreement"]), JSON))
def test_any_json_value_in_a_record_of_a_series(changes):
    attempt(TARGETS["group"], json.dumps(record(3) | changes).encode())


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=2000))
def test_any_bytes(kind, content):
    attempt(TARGETS[kind], content)


def test_mutated_tensor_files():
    valid = save_arrays({"features": pixels(0, 4, 8)[..., 0].astype("float16")}, {"encoder": "{}"})
    num_read = 0
    for number in range(2000):
        rng = random.Random(number)
        content = blindly(mutate(valid, rng, kind="image") if number % 3 else valid, rng)
        try:
            read_tensors(content, where="shards/x")
            num_read += 1
        except ValueError as error:
            assert type(error) is ValueError and str(error).startswith("shards/x: ")
    assert 0 < num_read < 1500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        *(("shard", 150_000), ("image", 300_000), ("group", 300_000)),
        *(("commit", 100_000), ("index", 100_000), ("labels", 100_000)),
    ],
)
def test_coverage_guided(kind, runs, tmp_path):
    """libFuzzer's limits: memory with the instrumented interpreter, and 5 s per input."""
    pytest.importorskip("atheris")
    (tmp_path / "corpus").mkdir()
    # A process starts with the peak memory of the one that starts it, so a small one does.
    small = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = [sys.executable, "-c", small, sys.executable, "-m", "tests.fuzz.coverage_guided"]
    command += [kind, str(tmp_path / "corpus")]
    limits = [f"-runs={runs}", "-rss_limit_mb=512", "-timeout=5", "-max_len=40000", "-seed=1"]
    completed = subprocess.run(
        [*command, *limits, f"-artifact_prefix={tmp_path}/", "-max_total_time=90"],
        cwd=ROOT,
        env=ALONE,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
