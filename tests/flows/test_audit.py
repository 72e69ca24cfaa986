"""`semix audit` on a dataset that was really built, compared with the values of the report."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from semix.calib.config import TrainConfig
from semix.calib.page import ComparedNoise, noise_rows
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.pinned import PinnedRoot
from semix.data.quality import weight_curve
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter
from semix.data.settings import load_settings
from semix.flows.audit import audit
from semix.flows.cli import app
from semix.flows.failures import RunFailed
from semix.flows.quickstart_report import measure_agreement


@pytest.fixture(scope="module")
def root(built, tmp_path_factory) -> Root:
    path = tmp_path_factory.mktemp("audited") / "mixed"
    shutil.copytree(built.url, path)
    return Root(str(path))


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    """make_run(name, **changes): a run after one epoch on a few real digits."""

    def make(name: str, **changes) -> Path:
        values = {
            "name": "judge",
            "real": {"name": "digits", "train_per_class": 6, "validation_per_class": 5},
            "model": {"name": "lenet"},
            "loss": {"name": "ce"},
            "epochs": 1,
            "batch_size": 20,
            "seeds": [0, 1],
        }
        config = load_settings(TrainConfig, values | changes)
        run = claim_run(config, tmp_path_factory.mktemp(name)).parent
        train_run(run)
        return run

    return make


@pytest.fixture(scope="module")
def judge(make_run) -> Path:
    return make_run("judge")


@pytest.fixture(scope="module")
def audit_result(root, judge, tmp_path_factory) -> dict:
    return audit(root.url, judge=judge, out=tmp_path_factory.mktemp("out"))


@pytest.mark.process  # for its length
def test_the_audit_has_the_figures_of_the_report(root, judge, audit_result):
    """They are equal exactly: the same functions over the same numbers."""
    mixed = MixedDataset(root.url)
    agreement = measure_agreement(mixed, judge)
    (row,) = noise_rows([ComparedNoise("all", mixed, agreement)])
    values = json.loads(Path(audit_result["json"]).read_text())
    overall = values["overall"]
    assert (values["series"], values["images"]) == (row.series, row.images)
    assert overall["correlation"]["median"] == row.median
    assert overall["correlation"]["mean"] == row.mean
    assert overall["correlation"]["not_monotone"] == row.not_monotone
    classifier = agreement.pop("classifier")
    assert overall["end_points"]["judge"] == agreement
    assert values["judge"] == classifier
    curve = weight_curve(mixed.alphas, mixed.weights)
    assert overall["weight_curve"]["alphas"] == curve.alphas.tolist()
    assert overall["weight_curve"]["mean"] == curve.mean.tolist()
    assert overall["weight_curve"]["quantiles"] == curve.quantiles.tolist()
    assert values["digest"] == mixed.digest


def test_flags_are_stored_where_readers_exclude_by_them(root, audit_result):
    assert audit_result["flags_file"] == "audit/0.json"
    flags = json.loads(root.store.get("audit/0.json"))
    assert flags["flags"] == audit_result["flags"]
    source = PinnedRoot(Root(root.url))
    for flag, rules in (
        ("not_monotone", Exclusion(monotone=True)),
        ("end_points", Exclusion(end_points=True)),
    ):
        series_filter, left_out = SeriesFilter(rules, source), set()
        for shard in source.shards:
            records = [sample.record for sample in source.samples(shard)]
            keep = series_filter.keep(shard, records)
            left_out |= {r.group for r, is_kept in zip(records, keep, strict=True) if not is_kept}
        assert left_out == set(audit_result["flags"][flag]) != set()


def test_the_command_prints_a_table_and_leaves_the_page_in_place(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["audit", root.url], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "weight follows alpha" in result.stdout and "look" in result.stdout
    assert (tmp_path / "audit-mixed" / "audit.html").read_text().startswith("<!doctype html>")
    assert f"page: {tmp_path}/audit-mixed/audit.html" in result.stdout
    assert "flags: audit/" in result.stdout


def test_json_is_the_same_as_the_file(root, tmp_path):
    result = CliRunner().invoke(app, ["audit", root.url, "--out", str(tmp_path), "--json"])
    printed = json.loads(result.stdout)
    stored = json.loads((tmp_path / "audit.json").read_text())
    assert {key: printed[key] for key in stored} == stored


def test_a_judge_must_have_seen_real_images_of_these_classes(root, make_run, judge, tmp_path):
    small = make_run("small", real={"name": "digits", "image_size": 16, "train_per_class": 6})
    audit(root.url, judge=small, out=tmp_path / "small")  # the images are scaled for it
    mixed = make_run("mixed", mixed={"url": root.url})
    with pytest.raises(InputError, match=r"judge = .*: was trained on mixed images"):
        audit(root.url, judge=mixed, out=tmp_path)
    with pytest.raises(InputError, match=r"judge = .*: holds no evaluation.json"):
        audit(root.url, judge=tmp_path / "nothing", out=tmp_path)
    data = json.loads((judge / "data.json").read_text())
    other_classes = {**data, "class_names": [*"abcdefghij"]}
    for name in ("config.json", "evaluation.json"):
        (small / name).write_bytes((judge / name).read_bytes())
    (small / "data.json").write_text(json.dumps(other_classes))
    with pytest.raises(InputError, match=r"judge = .*: has classes a, b, c, d, e, ..."):
        audit(root.url, judge=small, out=tmp_path)


def test_damage_is_named_and_the_exit_status_says_so(root, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(root.url, copy)
    tars = sorted(copy.rglob("*.tar"))
    tars[2].unlink()
    result = CliRunner().invoke(app, ["audit", str(copy), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert re.search(r"error: shards/0000/0000002-\w+\.tar: is not there", result.stderr)
    assert "39 series" in (tmp_path / "out" / "audit.html").read_text()
    for tar in tars[:2] + tars[3:]:
        tar.unlink()
    with pytest.raises(RunFailed, match=r"no shard of index/0.json can be read: .*semix verify"):
        audit(str(copy), out=tmp_path / "out")


def test_a_place_that_cannot_be_written_is_named_first(root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out = .*/file: cannot be written"):
        audit(root.url, out=tmp_path / "file")
