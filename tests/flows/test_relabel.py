"""Relabelling as a person does it: from features at once, from images through workers."""

import json
import logging
import shlex

import pytest
from prefect.client.orchestration import get_client

from semix.data.errors import InputError
from semix.data.label_sets import LabelSet, label_sets
from semix.data.root import Root
from semix.data.tar import read_shard
from semix.data.verify import damage
from semix.flows.artifacts import artifact_key
from semix.flows.relabel import RelabelFailed, list_label_sets, relabel
from tests.command import semix
from tests.pipeline.roots import create_root

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def log_text():
    """log_text(): what semix has logged so far."""
    logger, lines, handler = logging.getLogger("semix"), [], logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lambda: "\n".join(lines)
    logger.removeHandler(handler)
    logger.setLevel(before)


def files(root: Root) -> dict[str, bytes]:
    return {name: root.store.get(name) for name in root.store.list("")}


def test_nothing_is_done_where_nothing_differs(root, log_text):
    before = files(root)
    assert relabel(root) == {"url": root.url, "digest": None}
    assert files(root) == before
    assert "these are the root's own labels; nothing to do" in log_text()


def test_stored_features_are_labelled_and_what_is_complete_needs_no_server(
    root, monkeypatch, log_text, artifacts_of
):
    facts = relabel(root, ["annotation.scale=4.0"], slots=1)
    assert (facts["done"], facts["shards"], facts["scale"]) == (8, 8, 4.0)
    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(limit=1, sort="START_TIME_DESC")[0]
        assert run.name == "label root: annotation.scale=4.0"
        assert set(run.tags) == {"semix", "relabel"}
        assert run.parameters["overrides"] == ["annotation.scale=4.0"]
        key = artifact_key("relabel", root.url, facts["digest"])
        result = artifacts_of(run.id)
        assert result[key]["data"] == 100.0
        rows = {row["what"]: row["value"] for row in json.loads(result[f"{key}-summary"]["data"])}
        assert (rows["digest"], rows["done"]) == (facts["digest"], "8")
    before = files(root)
    monkeypatch.setattr(
        "semix.flows.relabel.run_flow", lambda *_, **__: pytest.fail("a flow began")
    )
    assert relabel(root, ["annotation.scale=4.0"]) == facts
    assert files(root) == before
    assert "complete, nothing to do" in log_text()
    assert list_label_sets(root) == [{key: facts[key] for key in list_label_sets(root)[0]}]


def test_stored_features_are_labelled_here_with_the_bytes_of_the_flow(
    root, tmp_path, monkeypatch, log_text
):
    baked = tmp_path / "of the flow", tmp_path / "made here"
    expected = relabel(root, ["annotation.scale=4.0"], slots=1, out=str(baked[0]))
    before = files(root)
    for name in before:
        if name.startswith("labels/"):
            root.store.delete(name)
    monkeypatch.setattr(
        "semix.flows.relabel.run_flow", lambda *_, **__: pytest.fail("a flow began")
    )
    facts = relabel(root, ["annotation.scale=4.0"], out=str(baked[1]))
    assert facts == {**expected, "out": str(baked[1])}
    assert files(root) == before
    first_root, second_root = map(Root, map(str, baked))
    assert first_root.plan == second_root.plan
    assert {r.sha256 for r in first_root.records()} == {r.sha256 for r in second_root.records()}
    assert "8 shards from stored features" in log_text()


def test_images_are_read_by_workers_and_their_features_serve_the_next_set(
    root, other_clip, prefect_api
):
    clip = f"annotation.model=local-dir:{other_clip}"
    facts = relabel(root, [clip], slots=2)
    assert (facts["done"], facts["features"]) == (8, "images")
    sharper = relabel(root, [clip, "annotation.scale=3.0"])
    assert (sharper["done"], sharper["features"]) == (8, facts["digest"])
    assert label_sets(root) == sorted([facts["digest"], sharper["digest"]])
    with_features, sharper_labels = (
        LabelSet(root, result["digest"]) for result in (facts, sharper)
    )
    for labels in (with_features, sharper_labels):
        root.store.delete(labels.name(2))
    assert relabel(root, [clip, "annotation.scale=3.0"])["done"] == 8
    assert (
        with_features.missing() == sharper_labels.missing() == []
    )  # the one with the features came first


def test_shards_that_cannot_be_labelled_are_named_and_the_rest_is_done(root):
    name = root.record(5).features.name
    content = root.store.get(name)
    root.store.delete(name)
    with pytest.raises(RelabelFailed) as caught:
        relabel(root, ["annotation.scale=4.0"])
    first, reason, last = str(caught.value).splitlines()
    assert first == "1 of 8 shards not labelled: 5"
    assert reason == f"shard 5: ValueError: {name}: the shard's features are not there"
    assert last.startswith("other shards are safe; go on with the same command")
    assert list_label_sets(root)[0]["done"] == 7
    root.store.put(name, content)
    assert relabel(root, ["annotation.scale=4.0"])["done"] == 8


def test_an_unfinished_root_is_labelled_as_far_as_it_is(root, log_text):
    root.discard(1)
    facts = relabel(root, ["annotation.scale=4.0"])
    assert (facts["done"], facts["shards"]) == (7, 7)
    assert f"1 of 8 shards have no images yet; run this again after `semix resume {root.url}`" in (
        log_text()
    )


def test_a_root_without_images_is_refused_before_anything_is_written(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "empty"))
    before = files(root)
    with pytest.raises(InputError, match="holds no images to label yet"):
        relabel(root, ["annotation.scale=4.0"])
    assert files(root) == before


def test_a_clip_that_is_not_there_is_refused_before_anything_is_written(root):
    before = files(root)
    with pytest.raises(InputError, match=r"annotation\.model = /no: there is no such folder"):
        relabel(root, ["annotation.model=local-dir:/no"])
    assert files(root) == before


def test_the_root_itself_is_no_place_to_bake_into(root):
    before = files(root)
    with pytest.raises(InputError, match=r"^out = .*: is the root itself; choose a new place"):
        relabel(root, ["annotation.scale=4.0"], out=root.url)
    assert files(root) == before


def test_a_folder_of_something_else_is_no_place_to_bake_into(root, tmp_path):
    before = files(root)
    (tmp_path / "own" / "cats").mkdir(parents=True)
    with pytest.raises(InputError, match="holds cats, and is no mixed dataset"):
        relabel(root, ["annotation.scale=4.0"], out=str(tmp_path / "own"))
    assert files(root) == before


def test_baking_makes_a_root_that_names_its_source(root, tmp_path):
    facts = relabel(root, ["annotation.scale=4.0"], out=str(tmp_path / "baked"))
    assert facts["baked"] == 8
    baked = Root(facts["out"])
    assert damage(baked, full=True) == []
    assert baked.indices() == ["index/0.json"]
    assert baked.plan.baked_from["labels"] == facts["digest"]
    assert images(baked) == images(root)
    before = files(baked)
    assert relabel(root, ["annotation.scale=4.0"], out=baked.url) == facts
    assert files(baked) == before


def images(root: Root) -> dict[int, list[bytes]]:
    series = {}
    for entry in root.records():
        series |= {s.record.group: s.images for s in read_shard(root.store, entry)}
    return series


def test_damaged_images_are_not_baked_and_named(root, tmp_path):
    name = root.record(4).tar
    tar = bytearray(root.store.get(name))
    tar[700] ^= 1
    root.store.put(name, bytes(tar))
    with pytest.raises(RelabelFailed) as caught:
        relabel(root, ["annotation.scale=4.0"], out=str(tmp_path / "baked"))
    text = str(caught.value)
    assert text.startswith(f"1 of 8 shards not baked: 4\nshard 4: {name}: ")
    assert text.endswith(f"go on after: semix resume {root.url}")
    baked = Root(str(tmp_path / "baked"))
    assert baked.missing() == [4]
    assert list(baked.failures()) == [4]


def test_the_command_shows_and_lists(root, prefect_api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    status, facts, _ = semix("relabel", root.url, "--set", "annotation.scale=4.0", "--json")
    assert (status, json.loads(facts)["done"]) == (0, 8)
    digest = json.loads(facts)["digest"]
    _, listing, _ = semix("relabel", root.url, "--list")
    assert listing == (
        f"{digest[:12]}  8 of 8 shards  projection, scale 4.0, {own_clip(root)}; "
        "differs from the root in scale: 4.0\n"
    )
    _, status_text, _ = semix("status", root.url, "--json")
    assert json.loads(status_text)["label_sets"] == digest[:12]
    assert json.loads(status_text)["incomplete_label_sets"] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["annotation.scale=3.0"],
        ["annotation.rule=similarity", "annotation.temperature=0.01"],
        ["annotation.rule=simplex", "annotation.normalize=true"],
    ],
)
def test_a_set_that_lacks_shards_is_named_with_the_command_that_makes_them(root, overrides):
    labels = LabelSet(root, relabel(root, overrides)["digest"])
    for shard in (2, 5):
        root.store.delete(labels.name(shard))
    _, status_text, _ = semix("status", root.url, "--json")
    (result,) = json.loads(status_text)["incomplete_label_sets"]
    assert (result["digest"], result["missing"]) == (labels.digest, 2)
    _, status_text, _ = semix("status", root.url)
    line = f"lacks labels of 2 shards; make them: {result['command']}\n"
    assert f"label set {labels.digest[:12]}" in status_text and line in status_text
    _, listing, _ = semix("relabel", root.url, "--list")
    assert f"  complete it: {result['command']}\n" in listing
    _, listing, _ = semix("relabel", root.url, "--list", "--json")
    expected = dict(text.removeprefix("annotation.").split("=") for text in overrides)
    settings = {
        name: str(value).lower() for name, value in json.loads(listing)[0]["settings"].items()
    }
    assert expected.items() <= settings.items()
    status, _, err = semix(*shlex.split(result["command"])[1:])
    assert status == 0, err
    assert labels.missing() == [] and label_sets(root) == [labels.digest]


def test_a_damaged_set_does_not_hide_how_far_the_root_is(root):
    digest = relabel(root, ["annotation.scale=3.0"])["digest"]
    root.store.put(f"labels/{digest}/set.json", b"{")
    status, status_text, _ = semix("status", root.url)
    assert status == 0 and "run `semix relabel` again" in status_text


def own_clip(root: Root) -> str:
    return root.plan.config["annotation"]["model"]
