"""Artifacts of runs on Prefect's pages, on a real server."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from prefect import flow, runtime
from prefect.artifacts import Artifact, create_markdown_artifact

from semix.calib.config import TrainConfig
from semix.data.files import write_json
from semix.data.formats import Failure
from semix.data.root import RecordTotals, RootProgress
from semix.data.settings import load_settings
from semix.flows.artifacts import (
    MAX_TEXT,
    artifact_key,
    as_text,
    best_effort_display,
    build_summary,
    growing_artifact,
    link_to,
    markdown_file,
    progress_artifact,
    series_sheet,
    summary,
    training_progress,
)
from semix.flows.flow_runs import run_context
from tests.handmade import make_root
from tests.trainings import SETTINGS

HALF = RootProgress(
    shards=4,
    done=2,
    failed=1,
    groups=8,
    groups_done=4,
    images=32,
    images_done=16,
)
TOTALS = RecordTotals(left_out=0, seconds=8.0, stages={"encode": 1.0, "generate": 6.0})
NONE = replace(HALF, done=0, groups_done=0, images_done=0)


def test_a_key_tells_places_and_plans_apart():
    keys = [
        artifact_key("build", "/data/My Set_2"),
        artifact_key("build", "/other/My Set_2"),
        artifact_key("build", "s3://bucket/My Set_2"),
        artifact_key("build", "/data/My Set_2", "plan"),
    ]
    assert len(set(keys)) == 4
    for key in keys:
        assert key.startswith("semix-build-my-set-2-")
        Artifact(key=key, data="")  # Prefect's own check
    Artifact(key=artifact_key("build", "/data/数"), data="")


def test_a_summary_in_numbers():
    facts = summary(HALF, TOTALS, began=NONE, seconds=32.0)
    assert facts == {
        "shards": "2 of 4, 2 in this run",
        "images": "16 of 32, 16 in this run",
        "this run": "32 s, 0.5 images/s",
        "one worker": "2 images/s",
        "images generated": "6.0 s of all workers",
        "images encoded": "1.0 s of all workers",
    }


def test_a_summary_tells_of_series_left_out():
    facts = summary(HALF, replace(TOTALS, left_out=1), began=NONE, seconds=32.0)
    assert (facts["left out"], facts["one worker"]) == ("1 series", "1.5 images/s")


def test_progress_of_a_training_counts_the_epochs_of_all_its_seeds(tmp_path):
    settings = load_settings(TrainConfig, {**SETTINGS, "seeds": [0, 1, 2], "epochs": 4})
    assert training_progress(settings, tmp_path) == (0.0, "0 of 3 seeds measured")
    write_json(tmp_path / "seed-0" / "evaluation.json", {})
    (tmp_path / "seed-0" / "history.jsonl").write_text("{}\n" * 2)  # ended early
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "history.jsonl").write_text("{}\n" * 2)
    fraction, text = training_progress(settings, tmp_path)
    assert (fraction, text) == (0.5, "1 of 3 seeds measured, seed 1: epoch 2 of 4")


@pytest.mark.parametrize(("images", "warned"), [(2, True), (5, False)])
def test_labels_that_came_out_nearly_hard_are_said_at_the_end_of_a_build(
    tmp_path, caplog, monkeypatch, prefect_api, images, warned
):
    """Labels of end points are all hard; of five images per series three are not."""
    monkeypatch.setattr(logging.getLogger("semix"), "propagate", True)
    root = make_root(tmp_path / "mixed", shards=2, count=images)
    build_summary(root, key="end", began=root.progress(), before=[], seconds=2.0)
    assert ("labels are nearly hard (0.00 of the entropy of equal labels)" in caplog.text) == warned


def test_a_picture_shrinks_until_it_fits():
    noise = np.random.default_rng(0).integers(0, 256, (500, 600, 3), dtype=np.uint8)
    assert MAX_TEXT / 4 < len(as_text(Image.fromarray(noise))) <= MAX_TEXT
    assert len(as_text(Image.new("RGB", (9000, 20)))) < 1000


@pytest.fixture(scope="module")
def shown_run(artifacts_of, tmp_path_factory):
    """Artifacts of one run by key, what the server showed on the way, and the lines of the log."""
    folder = tmp_path_factory.mktemp("shown")
    root = make_root(folder / "mixed", shards=6)
    root.discard(4)
    root.record_failure(Failure(shard=4, attempt=1, error="OSError", message="disk full", time=0.0))
    (folder / "study.md").write_text("# Study\n\n| a |\n|---|\n| 1 |\n\n![](figures/a.png)\n")
    updates, lines = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("semix.prefect").addHandler(handler)

    @flow
    def showing() -> str:
        def look() -> None:
            artifact = artifacts_of(runtime.flow_run.id)["grows"]
            updates.append((artifact["data"], artifact["description"]))

        with run_context("build"):
            with growing_artifact("grows") as publish:
                look()
                publish(0.25, "first")
                publish(0.5, "soon after")
                look()
            look()
            with progress_artifact("counts") as show:
                show(HALF)
            build_summary(root, key="end", began=root.progress(), before=[], seconds=2.0)
            series_sheet(root, key="end")
            markdown_file(folder / "study.md", key="end")
            link_to(folder / "study.md", key="end")
            for _ in range(2):
                with best_effort_display():
                    create_markdown_artifact("x", key="Not A Key")
        return str(runtime.flow_run.id)

    run = showing()
    logging.getLogger("semix.prefect").removeHandler(handler)
    return artifacts_of(run), updates, lines


def test_an_artifact_grows_now_and_then_and_ends_right(shown_run):
    _, updates, _ = shown_run
    assert updates == [(0.0, "begins"), (25.0, "first"), (50.0, "soon after")]


def test_progress_says_how_many_images(shown_run):
    artifact = shown_run[0]["counts"]
    assert (artifact["data"], artifact["description"]) == (50.0, "16 of 32 images, 1 failed shard")


def test_the_end_of_a_build_names_failures(shown_run):
    rows = {row["what"]: row["value"] for row in json.loads(shown_run[0]["end-summary"]["data"])}
    assert rows["shards"] == "5 of 6, 0 in this run"
    assert rows["shard 4 failed"] == "OSError: disk full"
    assert rows["entropy of labels"].endswith(" of equal labels'")


def test_series_are_shown_of_several_shards(shown_run):
    assert shown_run[0]["end-series"]["data"].startswith(
        "![series 1, 5, 9, 16](data:image/webp;base64,"
    )


def test_a_page_is_shown_without_its_figures_and_linked(shown_run):
    text = shown_run[0]["end-results"]["data"]
    assert "| 1 |" in text and "figures/a.png" not in text
    link = shown_run[0]["end-page"]["data"]
    assert link.startswith("[study.md](file:///") and link.endswith("/study.md)")


def test_what_prefect_refuses_is_said_once_and_costs_nothing(shown_run):
    _, _, lines = shown_run
    assert len(lines) == 1
    assert lines[0].startswith("Prefect does not show all of this run: ")
