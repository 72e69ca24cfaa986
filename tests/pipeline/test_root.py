"""Roots begun, refused, moved, extended; those of a newer version."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.formats import PLAN, CommitRecord, SeriesByRun, record_name
from semix.data.layout import next_extension, segment_of, write_extension
from semix.data.root import Root
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan, open_build
from semix.pipeline.root import create_build, extend_root, extend_root_by_run
from semix.pipeline.shard_job import BuildJob
from semix.pipeline.worker import Worker
from tests.command import semix
from tests.pipeline.roots import altered, contents, create_root, made, plan_of, tars, work


def test_another_config_on_the_same_root_is_refused_by_its_fields(built, hasty_config):
    changed = altered(hasty_config, "mixing.seed=5", "generator.steps=4")
    before = built.store.get(PLAN)
    with pytest.raises(InputError, match=r"generator\.steps is 3 there, mixing\.seed is 0 there"):
        create_root(changed, built.url)
    assert built.store.get(PLAN) == before
    assert create_root(hasty_config, built.url).missing() == []


def test_a_shard_size_that_is_not_set_is_stored_and_agrees_with_any(built, hasty_config, tmp_path):
    unset = altered(hasty_config, "shards.groups_per_shard=null")
    assert create_root(unset, built.url).missing() == []
    new = create_root(unset, str(tmp_path / "root"))
    assert new.plan.config["shards"]["groups_per_shard"] == 4  # 45 groups in batches of 4
    assert len(new.missing()) == 12 and plan_of(new).num_shards == 12
    other = altered(hasty_config, "shards.groups_per_shard=5")
    assert work(new, "--shards", "0") == 0
    with pytest.raises(InputError, match=r"shards\.groups_per_shard is 6 there"):
        create_root(other, built.url)


def test_changed_model_files_are_refused_while_shards_are_missing(
    make_config, hasty_standins, tmp_path
):
    shutil.copytree(hasty_standins.diffusion, tmp_path / "model")
    config = make_config(hasty_standins, f"generator.model={tmp_path / 'model'}")
    assert work(create_root(config, str(tmp_path / "root")), "--shards", "0") == 0
    index = tmp_path / "model" / "model_index.json"
    index.write_text(index.read_text() + "\n")
    with pytest.raises(InputError, match=r"generator\.model = .*its files changed since"):
        create_root(config, str(tmp_path / "root"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.model=/nowhere", r"generator\.model = /nowhere: there is no such folder"),
        (
            "annotation.model=local-dir:/no",
            r"annotation\.model = /no: there is no such folder",
        ),
        (
            "generator.prompt=" + "a photo of " * 9 + "a {class}",
            r"generator\.prompt = 'a photo of .* a zero': has \d+ tokens, the model reads 16",
        ),
        ("generator.names={fox: wolf}", r"generator\.names = fox: is no class of the data"),
        ("annotation.model=ViT-B-33", r"annotation\.model = ViT-B-33: open_clip has no such model"),
        ("annotation.model=ViT-B-32", r"annotation\.pretrained = nothing: name a weights tag"),
    ],
)
def test_bad_models_stop_before_anything_is_written(hasty_config, tmp_path, override, message):
    with pytest.raises(InputError, match=message):
        create_root(altered(hasty_config, override), str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


def test_a_model_of_the_wrong_kind_is_named(hasty_config, hasty_standins, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(InputError, match="holds a FluxPipeline; family stable_diffusion needs"):
        create_root(altered(hasty_config, f"generator.model={wrong}"), str(tmp_path / "root"))


# Models and settings that changed on this machine.


FEW = ("mixing.pairs={kind: sampled, count: 6}", "shards.groups_per_shard=3")


def test_a_root_goes_on_with_models_that_were_moved(make_config, hasty_standins, tmp_path, capsys):
    """The old folders are gone; whole and moved builds end in the same images."""
    old, new = tmp_path / "here", tmp_path / "there"
    shutil.copytree(hasty_standins.diffusion, old / "sd")
    shutil.copytree(hasty_standins.clip, old / "clip")

    def config(folder: Path) -> BuildConfig:
        models = (f"generator.model={folder}/sd", f"annotation.model=local-dir:{folder}/clip")
        return make_config(hasty_standins, *FEW, *models)

    unmoved = made(config(old), tmp_path / "whole")
    root = made(config(old), tmp_path / "root", "--shards", "0")
    old.rename(new)
    assert work(root) == 78
    assert f"annotation.model = {old}/clip: there is no such folder" in capsys.readouterr().err
    again = create_build(config(new), root.url)
    assert again.root.plan.config["generator"]["model"] == f"{old}/sd"  # plan.json stays
    assert Worker(BuildJob(again), 0, 1, device="cpu").run() == 0
    assert tars(root) == tars(unmoved)
    root.discard(1)
    assert work(root, *(word for change in again.overrides for word in ("--set", change))) == 0
    assert tars(root) == tars(unmoved)


def test_other_models_than_a_root_was_begun_with_are_refused(root, hasty_standins, tmp_path):
    config = BuildConfig.model_validate(root.plan.config)
    shutil.copytree(hasty_standins.diffusion, tmp_path / "sd")
    root.discard(3)
    moved = altered(config, f"generator.model={tmp_path / 'sd'}", "shards.max_left_out=0.5")
    assert create_build(moved, root.url).config.shards.max_left_out == 0.5
    index = tmp_path / "sd" / "model_index.json"
    index.write_text(index.read_text() + "\n")
    with pytest.raises(InputError, match=r"generator\.model = .*/sd: its files changed since"):
        create_root(moved, root.url)


def test_a_finished_root_refuses_another_generator(root, hasty_standins, tmp_path):
    config = BuildConfig.model_validate(root.plan.config)
    assert root.missing() == []
    shutil.copytree(hasty_standins.diffusion, tmp_path / "sd")
    moved = altered(config, f"generator.model={tmp_path / 'sd'}")
    assert create_build(moved, root.url).overrides  # the same files elsewhere
    index = tmp_path / "sd" / "model_index.json"
    index.write_text(index.read_text() + "\n")
    with pytest.raises(InputError, match=r"generator\.model = .*/sd: its files changed since"):
        create_root(moved, root.url)
    shutil.rmtree(tmp_path / "sd")
    assert create_root(config, root.url).missing() == []  # a plan's own models may be gone


def test_a_worker_takes_no_setting_that_decides_bytes(root, capsys):
    root.discard(3)
    assert work(root, "--set", "mixing.seed=1") == 78
    assert "overrides = mixing.seed=1: a root keeps the settings" in capsys.readouterr().err
    assert open_build(root.url, ["noise.max_cost=9"]).root.missing() == [3]


# A newer version of semix.


@pytest.mark.parametrize("newer", [0, 3])
def test_a_record_of_a_newer_version_is_named_and_nothing_is_overwritten(root, newer):
    """The record is complete and has a field that this version does not know."""
    name = record_name(newer)
    record = json.loads(root.store.get(name)) | {"schema": CommitRecord.SCHEMA + 1, "colour": "red"}
    root.store.put(name, json.dumps(record).encode())
    before = contents(root)
    status, _, stderr = semix("resume", root.url)
    assert status == 2
    message = f"error: {root.url}/{name} schema = 2: a newer version of semix wrote it, this one"
    assert stderr.startswith(message)
    assert contents(root) == before


def test_a_worker_makes_nothing_beside_a_first_record_of_a_newer_version(root, capsys):
    root.discard(5)
    name = record_name(0)
    newer = json.loads(root.store.get(name)) | {"schema": CommitRecord.SCHEMA + 1}
    root.store.put(name, json.dumps(newer).encode())
    before = contents(root)
    assert work(root) == 78
    assert f"{name} schema = 2: a newer version" in capsys.readouterr().err
    assert contents(root) == before


# Extending.


def series(config: BuildConfig, count: int, *overrides: str) -> BuildConfig:
    return altered(config, f"mixing.groups_per_pair={count}", *overrides)


@pytest.fixture
def empty(hasty_config, tmp_path) -> Root:
    """A root without shards."""
    return create_root(hasty_config, str(tmp_path / "root"))


def test_the_groups_that_come_are_those_of_a_larger_plan(empty, hasty_config):
    before = plan_of(empty)
    extended = extend_root(empty, 3)
    plan, larger = plan_of(extended), BuildPlan(series(hasty_config, 3))
    assert plan.digest == before.digest == extended.plan.digest
    assert plan.num_groups == larger.num_groups == 135
    assert [plan.group(i) for i in range(135)] == [larger.group(i) for i in range(135)]
    assert [plan.shard(i) for i in range(8)] == [before.shard(i) for i in range(8)]
    assert (plan.shard(7).start, plan.shard(7).stop) == (42, 45)  # stays short
    assert (plan.shard(8).start, plan.shard(8).stop) == (45, 51)
    covered = [
        g for i in range(plan.num_shards) for g in range(plan.shard(i).start, plan.shard(i).stop)
    ]
    assert covered == list(range(135))
    added = segment_of(extended.extensions[0])
    assert (added.first_group, added.last_group) == (45, 134)
    assert (added.first_shard, added.last_shard) == (8, 22)


def test_extensions_follow_each_other(empty):
    twice = extend_root(extend_root(empty, 2), 4)
    assert [e.groups_per_pair for e in twice.extensions] == [2, 4]
    assert plan_of(twice).num_groups == twice.plan.num_groups == 180


def by_run(*series: tuple[int, int, int]) -> SeriesByRun:
    return SeriesByRun(run="/runs/ce", digest="1a", by="confusion", images=40, series=list(series))


def test_series_that_a_run_asked_for_lie_between_even_ones(empty, hasty_config):
    """Rounds of a run change no earlier group, and even rounds after them begin anew."""
    even = plan_of(extend_root(empty, 2))
    asked = by_run((0, 1, 3), (4, 7, 1), (8, 9, 2))
    extended = extend_root_by_run(Root(empty.url), 6, lambda: asked)
    longer = plan_of(extend_root(extended, 3))
    assert longer.num_groups == 90 + 6 + 45
    assert [longer.group(i) for i in range(90)] == [even.group(i) for i in range(90)]
    pairs = [longer.group(i).classes for i in range(90, 96)]
    assert pairs == [(0, 1), (8, 9), (4, 7), (0, 1), (8, 9), (0, 1)]
    assert [longer.group(i).classes for i in range(96, 141)] == [*combinations(range(10), 2)]
    assert len({longer.group(i).seed for i in range(141)}) == 141
    rounds = Root(empty.url).status()["rounds"]
    assert [(each["series"], each["by"]) for each in rounds] == [
        (45, "even"),
        (45, "even"),
        (6, "confusion, /runs/ce"),
        (45, "even"),
    ]
    assert "rounds" not in create_root(hasty_config, f"{empty.url}-other").status()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"series": [[0, 1, 5]]}, "the series of all pairs are not 6"),
        ({"series": [[0, 10, 6]]}, "a pair is not of the 10 classes"),
        ({"series": [[1, 0, 6]]}, "the classes of a pair do not ascend"),
        ({"series": [[0, 1, 3], [0, 1, 3]]}, "pairs do not ascend"),
        ({"series": [[0, 1, 0]]}, "greater than or equal to 1"),
        ({"run": None}, "valid string"),
    ],
)
def test_a_damaged_extension_by_a_run_is_named(empty, change, message):
    extend_root_by_run(empty, 6, lambda: by_run((0, 1, 6)))
    path = Path(empty.url) / "extensions" / "1.json"
    content = json.loads(path.read_text())
    content["by_run"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"extensions/1.json = damaged: .*{message}"):
        Root(empty.url)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_root_is_never_made_smaller(empty, count):
    extend_root(empty, 2)
    with pytest.raises(InputError, match=rf"groups_per_pair = {count}: .* has 2 already"):
        extend_root(Root(empty.url), count)


def test_who_extends_second_is_told(empty):
    late = Root(empty.url)
    extend_root(empty, 2)
    with pytest.raises(InputError, match=r"= 3: someone else extended .* to 90 series meanwhile"):
        extend_root(late, 3)
    assert Root(empty.url).plan.num_groups == 90


def test_more_series_than_keys_can_count_are_refused(empty):
    with pytest.raises(InputError, match=r"at most 100,000,000 series"):
        extend_root(empty, 10_000_000)


def test_the_first_config_goes_on_with_an_extended_root(empty, hasty_config):
    assert work(empty, "--shards", "0") == 0
    with pytest.raises(InputError, match=r"groups_per_pair = 2: .*has 1; add .*`semix extend`"):
        create_root(series(hasty_config, 2), empty.url)
    extend_root(empty, 2)
    assert create_root(hasty_config, empty.url).plan.num_shards == 16
    with pytest.raises(InputError, match=r"= 2: was extended from 1 to that; go on with"):
        create_root(series(hasty_config, 2), empty.url)
    with pytest.raises(InputError, match=r"= 3: .*has 2; add series"):
        create_root(series(hasty_config, 3), empty.url)
    with pytest.raises(InputError, match=r"holds another plan .*groups_per_pair.*mixing\.seed"):
        create_root(series(hasty_config, 3, "mixing.seed=9"), empty.url)


def test_an_extension_file_alone_is_enough(empty):
    """The extension alone is read: no settings, no plan.json, no clock."""
    values = next_extension(empty.plan.digest, empty.layout, 45, groups_per_pair=2)
    assert write_extension(empty.store, 1, values)
    assert plan_of(Root(empty.url)).num_groups == 90
