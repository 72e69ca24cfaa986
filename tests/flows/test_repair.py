"""A built root, damaged and mended, extended, and finished without what fails."""

import json
import logging
import shlex
import shutil
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.formats import shard_stem
from semix.data.garbage import garbage
from semix.data.index import open_index
from semix.data.label_sets import LabelSet
from semix.data.printable import noise_in_words
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.verify import damage
from semix.flows.build import BuildFailed, build, extend, resume
from semix.flows.build_steps import ShardSelection, failure_limit
from semix.flows.relabel import relabel
from semix.pipeline.config import BuildConfig
from semix.pipeline.worker import main as worker
from tests.command import semix
from tests.pipeline.roots import create_root


def tars(root: Root) -> dict[str, bytes]:
    return root.store.get_many(entry.tar for entry in root.records())


def rewrite(root: Root, name: str, change) -> None:
    root.store.put(name, change(root.store.get(name)))


def test_resume_makes_all_that_is_damaged_again(prefect_api, root, built, caplog):
    names = [entry.tar for entry in root.records()]
    rewrite(root, names[0], lambda content: content[:-100])
    rewrite(root, names[1], lambda content: content[:3000] + b"?" + content[3001:])
    root.store.delete(names[2])
    rewrite(root, f"{shard_stem(3)}.json", lambda content: content[:-100])
    root.store.delete(f"{shard_stem(4)}.json")
    rewrite(root, "prototypes.safetensors", lambda content: content[:-1] + b"?")
    rewrite(root, "index/0.json", lambda content: content[:-2])
    status, out, _ = semix("verify", root.url, "--full", "--json")
    assert status == 1
    damage_found = [(p["kind"], p["shard"]) for p in json.loads(out) if p["damage"]]
    shards = [("shard", 0), ("shard", 1), ("shard", 2)]
    assert sorted(damage_found, key=str) == sorted(
        [("record", 3), *shards, ("prototypes", None), ("index", None)], key=str
    )
    mended = resume(Root(root.url), slots=1, full=True)
    assert mended.missing() == []
    assert tars(mended) == tars(built)
    same = "prototypes.safetensors"
    assert mended.store.get(same) == built.store.get(same)
    assert [problem.kind for problem in damage(mended, full=True)] == ["index"]
    assert mended.indices() == ["index/0.json", "index/1.json"]
    assert sorted(root.store.list("discarded")) == [
        *(f"discarded/0000/000000{shard}.1.json" for shard in range(4)),
        "discarded/prototypes.1.json",
    ]


def test_a_root_goes_on_where_its_models_were_moved(prefect_api, root, built, tmp_path):
    """Both ways to say so reach the workers; plan and bytes stay."""
    moved = tmp_path / "moved"
    shutil.copytree(built.plan.config["generator"]["model"], moved)
    plan = root.store.get("plan.json")
    lost = plan.replace(built.plan.config["generator"]["model"].encode(), b"/lost")
    root.store.put("plan.json", lost)  # as it came from another machine
    config = load_settings(BuildConfig, built.plan.config, [f"generator.model={moved}"])
    for shard, make in (
        (1, lambda: resume(root.url, overrides=[f"generator.model={moved}"], slots=1)),
        (2, lambda: build(config, root.url, slots=1)),
    ):
        root.discard(shard)
        with pytest.raises(InputError, match=r"^generator\.model = /lost: there is no such folder"):
            resume(root.url, slots=1)
        assert make().missing() == []
    assert root.store.get("plan.json") == lost
    assert tars(root) == tars(built)


@pytest.fixture
def similar(make_config, hasty_standins, tmp_path) -> Root:
    """A complete root of pairs that were drawn by similarity."""
    pairs = "mixing.pairs={kind: similar, count: 3}"
    root = create_root(make_config(hasty_standins, pairs), str(tmp_path / "similar"))
    assert worker([root.url, "--device", "cpu"]) == 0
    root.write_index()
    return root


def test_the_prototypes_of_a_whole_root_are_measured_again(similar):
    name = "prototypes.safetensors"
    before = similar.store.get(name)
    similar.store.delete(name)
    status, _, err = semix("show", similar.url, "1", "--regenerate", "--device", "cpu")
    assert status == 2 and f"needs {name}; run `semix resume" in err
    status, _, err = semix("resume", similar.url, "--device", "cpu")
    assert status == 0 and f"{name} is missing" in err
    assert similar.store.get(name) == before
    assert semix("verify", similar.url)[0] == 0


def test_extending_adds_behind_and_touches_nothing(prefect_api, root):
    """It also says which label sets lack the new shards."""
    digest = relabel(root, ["annotation.scale=4.0"])["digest"]
    before = {name: root.store.get(name) for name in root.store.list("")}
    status, out, _ = semix("extend", root.url, "--groups-per-pair", "2", "--slots", "1")
    assert status == 0
    longer = Root(root.url)
    assert longer.plan.num_groups == 90
    assert longer.missing() == []
    assert damage(longer, full=True) == []
    assert {name: root.store.get(name) for name in before} == before
    assert longer.indices() == ["index/0.json", "index/1.json"]
    shards = open_index(root.store, "index/1.json").shards
    assert [shard.shard for shard in shards] == list(range(16))
    assert garbage(longer, older_than_s=0) == []
    with pytest.raises(InputError, match=r"groups_per_pair = 2: .* has 2 already"):
        extend(longer, 2)
    (line,) = [line for line in out.splitlines() if "lacks labels of 8 shards; make" in line]
    assert line.startswith(f"label set {digest[:12]}")
    command = line.partition("make them: ")[2]
    assert semix(*shlex.split(command)[1:])[0] == 0
    assert LabelSet(root, digest).missing() == []


def test_failed_shards_can_be_left_out_and_tried_again(prefect_api, root, hasty_config, caplog):
    for shard in (3, 5):
        root.discard(shard)
    obstacle = Path(root.url) / f"{shard_stem(3)}.json"
    obstacle.mkdir()
    left_out = "1 of 8 shards failed and are left out: 3; the index is without them"
    with caplog.at_level(logging.WARNING, "semix.build"):  # of 8 shards 13 % is one
        finished = resume(Root(root.url), slots=1, selection=ShardSelection(skip_failed="13%"))
    assert left_out in caplog.text
    assert (finished.missing(), finished.attempts(3)) == ([3], 1)
    assert root.indices() == ["index/0.json", "index/1.json"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "semix.build"):
        finished = build(hasty_config, root.url, slots=1, selection=ShardSelection(skip_failed="1"))
    assert left_out in caplog.text
    assert finished.attempts(3) == 1  # it was not tried
    with pytest.raises(BuildFailed, match="1 of 8 shards not made: 3"):
        resume(Root(root.url), slots=1, selection=ShardSelection(skip_failed="0"))
    obstacle.rmdir()
    root.discard(6)
    again = resume(Root(root.url), slots=1, selection=ShardSelection(retry_failed=True))
    assert again.missing() == [6]
    assert again.record(3).attempt == 2


@pytest.mark.parametrize(
    ("limit", "shards"),
    [("5", 5), ("0", 0), ("1%", 10), ("0.5 %", None), ("0.25%", 2), ("100%", 1000), ("101%", None)],
)
def test_limits(limit, shards):
    if shards is None:
        with pytest.raises(InputError, match=r"skip-failed = .*give a number of shards \(5\)"):
            failure_limit(limit, 1000)
    else:
        assert failure_limit(limit, 1000) == shards


def test_noise_is_told_in_words():
    scored = {"strategy": "select", "stability": 0.81234, "scores": [0.5, None], "steps": 20}
    assert noise_in_words(scored) == "select, stability 0.812, scores (0.5, unknown), steps 20"
    assert noise_in_words({"strategy": "random", "stability": None}) == "random"


def test_show_prints_a_series_and_makes_its_picture(root, tmp_path):
    picture = tmp_path / "series.png"
    arguments = ("--out", str(picture), "--regenerate", "--device", "cpu")
    status, out, err = semix("show", root.url, "44", *arguments)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0] == f"group 44, shard 7: {root.record(7).tar}"
    assert lines[1] == "classes  eight (8), nine (9)"
    assert lines[3] == "noise    random"
    assert lines[-2:] == ["regenerated pixels equal the stored ones", f"picture  {picture}"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    root.discard(7)
    status, out, _ = semix("show", root.url, "44")
    assert (status, out) == (
        0,
        f"group 44, shard 7: not made yet; semix resume {root.url} --shards 7\n",
    )
    status, out, _ = semix("show", root.url, "0", "--json")
    assert json.loads(out)["classes"] == [0, 1]
