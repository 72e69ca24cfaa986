"""`semix export`: Croissant metadata that mlcroissant accepts and reads, cards, and the upload."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlcroissant
import pytest

from semix.data.exclusion import store_flags
from semix.data.formats import FLAGS, SeriesFlags
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from tests.command import semix
from tests.handmade import make_root

CARD = """
name: Birds between
description: Birds, mixed.
license: https://spdx.org/licenses/CC-BY-4.0
creators: [A. Author]
url: https://example.org/birds
version: "1.0.0"
date_published: 2026-11-26
cite_as: "@misc{birds}"
real_data: https://example.org/real
limitations: [Small pictures.]
biases: [Few owls.]
personal_sensitive_information: none
use_cases: [Calibration.]
social_impact: Little.
"""


@pytest.fixture
def root(tmp_path) -> Root:
    return make_root(tmp_path / "root", shards=2, groups=3)


def exported(root, folder, *options) -> dict:
    """The facts of an export."""
    status, out, err = semix("export", root.url, "--to", str(folder), *options, "--json")
    assert status == 0, err
    return json.loads(out)


def accepted(path: Path) -> mlcroissant.Dataset:
    """The dataset, which mlcroissant reads without an error; every hash is that of its file."""
    dataset = mlcroissant.Dataset(str(path))
    assert not dataset.metadata.ctx.issues.errors
    for file in json.loads(path.read_text())["distribution"]:
        if file["@type"] == "cr:FileObject":
            content = (path.parent / file["contentUrl"]).read_bytes()
            assert file["sha256"] == hashlib.sha256(content).hexdigest()
            assert file["contentSize"] == f"{len(content)} B"
    return dataset


@pytest.mark.parametrize("layout", ["folder", "parquet", "huggingface"])
def test_mlcroissant_reads_an_export(root, tmp_path, layout):
    folder = tmp_path / "out"
    facts = exported(root, folder, "--format", layout)
    path = Path(facts["metadata"]) if layout == "parquet" else folder / "croissant.json"
    dataset = accepted(path)
    rows = list(dataset.records("images"))
    assert [(row["images/group"], row["images/position"]) for row in rows] == [
        (group, position) for group in range(6) for position in range(2)
    ]
    if layout != "folder":
        assert rows[0]["images/image"].size == (8, 8)
        assert list(rows[1]["images/label"]) == [1.0, 0.0, 0.0]
        assert dataset.metadata.record_sets[2].fields[-1].array_shape == "3"
    assert [row["classes/name"] for row in dataset.records("classes")] == ["cat", "dog", "fox"]
    assert list(dataset.records("splits")) == [{"splits/name": "train"}]
    if layout == "parquet":  # pyarrow reads every file of the folder
        assert {path.suffix for path in folder.iterdir()} == {".parquet"}


def test_an_index_is_described_in_its_root(root):
    status, _, err = semix("export", root.url, "--format", "croissant")
    assert status == 0, err
    dataset = accepted(Path(root.url) / "croissant.json")
    records = [json.loads(row["series/record"]) for row in dataset.records("series")]
    assert sorted(record["group"] for record in records) == list(range(6))
    tars = {file["@id"]: file["sha256"] for file in metadata_of(root)["distribution"][:2]}
    assert tars == {shard.tar: shard.sha256 for shard in PinnedRoot(root).shards}
    assert Root(root.url).progress().done == 2  # the root is as it was


def metadata_of(root: Root) -> dict:
    assert semix("export", root.url, "--format", "croissant")[0] == 0
    return json.loads(root.store.get("croissant.json"))


def test_where_it_comes_from_and_what_limits_it(root):
    values = metadata_of(root)
    assert values["rai:hasSyntheticData"] is True
    assert "The series were not audited." in values["rai:dataLimitations"]
    labels = [entity["prov:label"] for entity in values["prov:wasDerivedFrom"]]
    assert labels[0].startswith("real images: ")
    assert labels[1:] == ["generator: sd, licence unknown", "annotation: tiny, licence unknown"]
    assert root.plan.digest in values["prov:wasGeneratedBy"][0]["prov:label"]
    source = PinnedRoot(root)
    flags = {flag: [1, 4] if flag == "end_points" else [] for flag in FLAGS}
    audit = SeriesFlags(index=source.index, digest=source.digest, labels=None, flags=flags)
    store_flags(root, audit)
    (found,) = (text for text in metadata_of(root)["rai:dataLimitations"] if "audit" in text)
    assert found.startswith(
        "2 of 6 series have an unmixed image that CLIP finds nearest to another"
    )


def test_what_a_person_states_is_in_it_and_the_rest_is_named(root, tmp_path):
    status, out, _ = semix("export", root.url, "--to", str(tmp_path / "bare"))
    assert status == 0
    assert "croissant.json lacks license, creators, url, version, date_published" in out
    card = tmp_path / "card.yaml"
    card.write_text(CARD)
    facts = exported(root, tmp_path / "out", "--card", str(card))
    assert facts["missing"] == []
    path = tmp_path / "out" / "croissant.json"
    metadata = accepted(path).metadata
    assert not metadata.ctx.issues.warnings
    assert metadata.data_biases[1] == "Few owls."
    values = json.loads(path.read_text())
    assert values["creator"] == [{"@type": "sc:Organization", "name": "A. Author"}]
    assert values["datePublished"] == "2026-11-26"
    assert values["prov:wasDerivedFrom"][0]["prov:label"] == "real images: https://example.org/real"
    assert values["rai:personalSensitiveInformation"] == "none"


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("licence: MIT", "unknown setting; did you mean license?"),
        ("version: 1.0", "version = "),
        ("date_published: soon", "date_published = 'soon'"),
        ("creators: [", "cannot be read as YAML"),
    ],
)
def test_a_card_with_a_mistake_is_refused_before_anything_is_written(root, tmp_path, card, message):
    (tmp_path / "card.yaml").write_text(card)
    options = ("--to", str(tmp_path / "out"), "--card", str(tmp_path / "card.yaml"))
    status, _, err = semix("export", root.url, *options)
    assert status == 2 and message in err
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together_are_named(root, tmp_path):
    to = ("--to", str(tmp_path / "out"))
    mistakes = {
        (): "--to = nothing: name the folder to write",
        (*to, "--format", "croissant"): "is written into the root; leave the option out",
        ("--format", "croissant", "--scale", "2"): "leave --labels and --scale out",
        ("--format", "croissant", "--image-format", "png"): "leave --sign and --image-format out",
        (*to, "--push-to-hub", "me/birds"): "goes with --format huggingface",
        (*to, "--dry-run"): "goes with --push-to-hub OWNER/NAME",
        (*to, "--format", "huggingface", "--push-to-hub", "a b"): "give OWNER/NAME",
    }
    for options, message in mistakes.items():
        status, _, err = semix("export", root.url, *options)
        assert status == 2 and message in err, (options, err)
    assert not (tmp_path / "out").exists()


def test_a_file_beside_a_parquet_folder_is_not_overwritten(root, tmp_path):
    (tmp_path / "out.croissant.json").write_text("mine")
    options = ("--to", str(tmp_path / "out"), "--format", "parquet")
    status, _, err = semix("export", root.url, *options)
    assert status == 2 and "out.croissant.json: is there already" in err
    assert not (tmp_path / "out").exists()


FILES = ["README.md", "classes.json", "croissant.json", "data/train-00000-of-00001.parquet"]


def test_a_dry_run_lists_what_would_go(root, tmp_path):
    options = ("--format", "huggingface", "--push-to-hub", "me/birds", "--dry-run")
    facts = exported(root, tmp_path / "out", *options)
    assert (facts["repository"], facts["dry_run"], facts["files"]) == ("me/birds", True, FILES)


HUB = "https://huggingface.co"  # in answers; nothing is sent there


class Hub(BaseHTTPRequestHandler):
    """The requests of an upload, as the Hugging Face Hub answers them."""

    log: list[tuple[str, list[dict]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        lines = [json.loads(line) for line in body.splitlines()]
        self.log.append((self.path, lines))
        answer: dict = {"url": f"{HUB}/datasets/me/birds", "name": "me/birds"}
        if "/preupload/" in self.path:
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [modes | {"path": file["path"]} for file in lines[0]["files"]]}
        if "/commit/" in self.path:
            answer = {"commitUrl": f"{HUB}/datasets/me/birds/commit/0", "commitOid": "0" * 40}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"sha": "0" * 40, "id": "me/birds", "siblings": []})

    def _answer(self, values: dict) -> None:
        content = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.process
def test_the_folder_is_uploaded_whole(root, tmp_path, monkeypatch):
    """huggingface_hub itself, against a server that answers as the Hub."""
    Hub.log = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.__init__", hub_at(address))
    options = ("--format", "huggingface", "--push-to-hub", "me/birds")
    facts = exported(root, tmp_path / "out", *options)
    server.shutdown()
    server.server_close()
    created = next(lines[0] for path, lines in Hub.log if path == "/api/repos/create")
    assert (created["type"], created["name"]) == ("dataset", "birds")
    commit = next(lines for path, lines in Hub.log if "/commit/" in path)
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in commit
        if line["key"] == "file"
    }
    assert sorted(sent) == facts["files"] == FILES
    for name, content in sent.items():
        assert content == (tmp_path / "out" / name).read_bytes()


def hub_at(address: str):
    """An `HfApi.__init__` that connects to this server."""
    from huggingface_hub import HfApi

    original = HfApi.__init__

    def init(self, *arguments, **options) -> None:
        original(self, *arguments, **{"endpoint": address, "token": "hf_test"} | options)

    return init
