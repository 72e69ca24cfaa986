"""A plan of which nothing was made is replaced by the next build in its folder; no other is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from semix.data.errors import InputError
from semix.data.formats import PLAN, PROTOTYPES, Lease
from semix.data.leases import lease_name
from semix.data.machine import machine
from semix.data.root import Root
from semix.pipeline.config import BuildConfig
from semix.pipeline.root import running_on
from tests.command import semix
from tests.pipeline.roots import altered, create_root, made, tars, work

FEW = ("mixing.pairs={kind: sampled, count: 6}", "shards.groups_per_shard=3")


@pytest.fixture
def config(make_config, hasty_standins) -> BuildConfig:
    return make_config(hasty_standins, *FEW)


def without_a_weight(folder: Path, target: Path) -> Path:
    """A copy of a model that passes every check but cannot be loaded."""
    shutil.copytree(folder, target)
    (file,) = (target / "unet").glob("*.safetensors")
    weights = load_file(file)
    weights.pop("conv_in.weight")
    save_file(weights, file)
    return target


def test_the_corrected_build_takes_the_place_of_one_that_could_not_load_its_models(
    config, hasty_standins, other_clip, tmp_path, caplog
):
    """Its prototypes, which another CLIP measured, and its failures are replaced too."""
    broken = without_a_weight(hasty_standins.diffusion, tmp_path / "broken")
    wrong = altered(config, f"generator.model={broken}", f"annotation.model=local-dir:{other_clip}")
    failed = create_root(wrong, str(tmp_path / "root"))
    assert work(failed) not in (0, 1)
    assert failed.store.exists(PROTOTYPES) and not failed.done()
    with caplog.at_level("INFO", "semix"):
        root = create_root(config, failed.url)
    assert "nothing was made by the plan there; it is replaced" in caplog.text
    note = json.loads(root.store.get("discarded/plan.1.json"))
    assert json.loads(note["record"])["digest"] == failed.plan.digest
    assert root.plan.digest != failed.plan.digest and not root.store.exists(PROTOTYPES)
    assert work(root) == 0
    assert tars(root) == tars(made(config, tmp_path / "whole"))


def test_a_plan_that_was_ever_worked_by_stays(config, tmp_path):
    other = altered(config, "mixing.seed=9")
    root = made(config, tmp_path / "root", "--shards", "0")
    for _ in ("a shard", "one that was discarded"):
        with pytest.raises(InputError, match=r"holds another plan \(mixing\.seed is 0 there"):
            create_root(other, root.url)
        root.discard(0)
    assert Root(root.url).plan.digest == root.plan.digest


def test_a_plan_stays_while_a_living_process_is_at_it(config, tmp_path):
    root, other = create_root(config, str(tmp_path / "root")), altered(config, "mixing.seed=9")
    content = Lease(host=machine(), pid=os.getppid()).written()  # a living process
    for lease in (3, "prototypes", "run-0123456789abcdef", "plan"):
        root.store.put(lease_name(lease), content)
        with pytest.raises(InputError, match="holds another plan"):
            create_root(other, root.url)
        root.store.delete(lease_name(lease))
    assert create_root(other, root.url).plan.digest != root.plan.digest


def test_a_run_whose_plan_was_replaced_ends_before_it_begins(config, tmp_path):
    root = create_root(config, str(tmp_path / "root"))
    create_root(altered(config, "mixing.seed=9"), root.url)
    with pytest.raises(InputError, match="replaced its plan"), running_on(root):
        raise AssertionError("it began")


def test_a_check_says_what_a_build_would_replace_and_writes_nothing(config, tmp_path):
    root = create_root(config, str(tmp_path / "root"))
    before = root.store.get(PLAN), root.store.list("")
    path = tmp_path / "other.yaml"
    path.write_text(altered(config, "mixing.seed=9").model_dump_json(exclude_defaults=True))
    status, out, err = semix("build", str(path), "--out", root.url, "--check")
    assert status == 0, err
    assert "it is replaced" in err and "missing" in out
    assert (root.store.get(PLAN), root.store.list("")) == before


RACER = """
import sys
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.config import BuildConfig
from semix.pipeline.root import create_build
path, url = sys.argv[1:]
config = load_settings(BuildConfig, path)
print("ready", flush=True)
sys.stdin.readline()
try:
    print(create_build(config, url).plan.digest, flush=True)
except InputError as error:
    print(error.field, flush=True)
sys.stdin.readline()  # it lives, as a build does
"""


def race(configs: list[BuildConfig], url: str, folder: Path) -> list[str]:
    """Begin all builds at one moment; returns the digest of each plan, `out` where refused."""
    racers = []
    for number, config in enumerate(configs):
        path = folder / f"{number}.yaml"
        path.write_text(config.model_dump_json(exclude_defaults=True))
        command = [sys.executable, "-c", RACER, str(path), url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        racers.append(subprocess.Popen(command, text=True, **pipes))
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * len(racers)
        for racer in racers:
            racer.stdin.write("\n")
            racer.stdin.flush()
        return [racer.stdout.readline().strip() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


@pytest.mark.process
@pytest.mark.parametrize("round", range(3))
def test_of_several_that_would_replace_a_plan_at_once_one_does(config, tmp_path, round):
    root = create_root(config, str(tmp_path / "root"))
    configs = [altered(config, f"mixing.seed={seed}") for seed in (1, 2, 3)]
    results = race(configs, root.url, tmp_path)
    (winner,) = (result for result in results if result != "out")
    assert Root(root.url).plan.digest == winner != root.plan.digest
    assert root.store.list("discarded") == ["discarded/plan.1.json"]


@pytest.mark.process
def test_machines_that_begin_the_corrected_build_at_once_share_its_plan(config, tmp_path):
    root = create_root(config, str(tmp_path / "root"))
    results = race([altered(config, "mixing.seed=1")] * 3, root.url, tmp_path)
    assert set(results) == {Root(root.url).plan.digest} != {root.plan.digest}
