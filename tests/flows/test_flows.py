"""All flows as Prefect sees them: what a form explains and refuses, and a run of a worker."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.exceptions import ParameterTypeError, PrefectHTTPStatusError
from prefect.states import Cancelling
from prefect.utilities.urls import url_for

from semix.data.errors import InputError
from semix.data.installation import DISTRIBUTION
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.verify import damage
from semix.flows.artifacts import artifact_key
from semix.flows.build import BuildFailed, build, resume
from semix.flows.build_flow import build_flow
from semix.flows.build_steps import check_work, open_or_create
from semix.flows.calling import from_caller, run_flow
from semix.flows.flow_runs import run_context
from semix.pipeline.config import BuildConfig
from tests.handmade import committed
from tests.pipeline.roots import create_root

CHECKOUT = Path(__file__).parents[2]
KINDS = ("build", "relabel", "train", "evaluate", "study", "loop", "quickstart")
FLOWS = {kind: getattr(import_module(f"semix.flows.{kind}_flow"), f"{kind}_flow") for kind in KINDS}
WRONG = {
    "build": [
        ("slots", 191),
        ("runner", "slurm"),
        ("range", "1-4"),
        ("shards", "few"),
        ("skip_failed", "1.5"),
        ("overrides", ["mixing.seed"]),
        ("out", ""),
        ("device", "tpu"),
    ],
    "relabel": [("url", ""), ("overrides", ["scale"])],
    "train": [("config", ""), ("processes", 0), ("machine_rank", -1), ("main_process", "here")],
    "evaluate": [("run", ""), ("device", "cuda:1")],
    "study": [("config", ""), ("slots", -1)],
    "loop": [("config", ""), ("out", ""), ("rounds", 0), ("slots", -1)],
    "quickstart": [("out", ""), ("seeds", 0)],
}
GIVEN = {"out": "x", "url": "x", "run": "x", "config": "x"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_explained(kind):
    flow = FLOWS[kind]
    assert flow.name == f"semix-{kind}"
    assert len(flow.description) > 40
    schema = flow.parameters
    for name, facts in schema.properties.items():
        assert len(facts["description"]) > 20, name
        assert facts["type"] in ("string", "integer", "boolean", "array"), name
        assert ("default" in facts) != (name in schema.required), name


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, *wrong) for kind in KINDS for wrong in WRONG[kind]]
)
def test_values_that_cannot_be_are_refused_by_their_name(kind, name, value):
    flow = FLOWS[kind]
    parameters = {key: text for key, text in GIVEN.items() if key in flow.parameters.properties}
    flow.validate_parameters(parameters)
    with pytest.raises(ParameterTypeError, match=rf"\n - {name}(\.0)?: "):
        flow.validate_parameters(parameters | {name: value})


def test_a_flow_function_runs_only_as_a_flow(tmp_path):
    with pytest.raises(AssertionError, match="only in a flow"), run_context("build"):
        pass


def test_without_a_config_only_places_may_change(built):
    assert open_or_create(built.url, "", ["real.path=null"], device="cpu").plan.digest == (
        built.plan.digest
    )
    with pytest.raises(InputError, match=r"^overrides = mixing\.seed=1: a root keeps the settings"):
        open_or_create(built.url, "", ["mixing.seed=1"], device="cpu")


def test_a_root_of_another_version_is_named(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path))
    plan = json.loads(root.store.get("plan.json"))
    plan["config"]["generator"]["wings"] = 2
    root.store.put("plan.json", json.dumps(plan).encode())
    text = r"^.*/plan\.json generator\.wings: unknown setting; .*wrote this root: use that"
    with pytest.raises(InputError, match=text):
        check_work(open_or_create(str(tmp_path), "", [], device="cpu"))


def test_a_flow_takes_what_its_caller_made_ready_and_no_later_one_does(prefect_api, monkeypatch):
    looking = flow(
        lambda: (from_caller(Path), from_caller(str)), name="looking", persist_result=False
    )
    monkeypatch.setitem(sys.modules, "looking", SimpleNamespace(look=looking))
    assert run_flow("looking.look", prepared=CHECKOUT) == (CHECKOUT, None)
    assert run_flow("looking.look") == (None, None)


@pytest.fixture(scope="module")
def client(prefect_api):
    with get_client(sync_client=True) as prefect_client:
        yield prefect_client


@pytest.fixture(scope="module")
def deployment(client):
    """The build flow, registered so that the server checks its parameters."""
    return client.create_deployment(
        client.create_flow(build_flow),
        "here",
        entrypoint="semix.flows.build_flow.build_flow",
        path=str(CHECKOUT),
        parameter_openapi_schema=build_flow.parameters.model_dump_for_openapi(),
        enforce_parameter_schema=True,
    )


def test_the_server_refuses_what_the_form_would(client, deployment):
    with pytest.raises(PrefectHTTPStatusError) as caught:
        client.create_flow_run_from_deployment(deployment, parameters={"out": "x", "slots": -1})
    response = caught.value.response
    assert response.status_code == 409
    assert "'slots'" in response.text and "less than the minimum of 0" in response.text


@pytest.fixture(scope="module")
def executed(client, deployment, hasty_config, prefect_api, tmp_path_factory):
    """A run in a process that gets only the run's id, as from a worker: (run, root, output)."""
    folder = tmp_path_factory.mktemp("executed")
    (folder / "build.yaml").write_text(yaml.safe_dump(hasty_config.model_dump(mode="json")))
    parameters = {
        "out": str(folder / "Mixed Öne"),
        "config": f"file://{folder / 'build.yaml'}",
        "overrides": ["mixing.seed=7"],
        "device": "cpu",
    }
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    environment = {**os.environ, "PREFECT_API_URL": prefect_api, "PYTHONPATH": str(CHECKOUT)}
    environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)  # as in a worker's process
    completed = subprocess.run(
        [sys.executable, "-m", "prefect.engine", str(run.id)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert completed.returncode == 0, completed.stdout
    return client.read_flow_run(run.id), Root(parameters["out"]), completed.stdout


def test_a_run_that_has_only_its_parameters_builds_it_all(executed, ended_tasks):
    run, root, _ = executed
    assert run.state.is_completed()
    assert run.name == "build Mixed Öne"
    assert set(run.tags) == {"semix", "build"}
    assert root.plan.config["mixing"]["seed"] == 7
    assert root.missing() == []
    assert root.indices() == ["index/0.json"]
    tasks = ended_tasks(run.id, 3)
    assert sorted(tasks) == ["generate slot 0", "index", "plan"]
    assert not any(task.tags for task in tasks.values())  # else none would begin without a server


def test_what_semix_says_is_in_the_runs_log_and_once_on_the_terminal(executed, client, until):
    run, _, output = executed
    of_this_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))

    def log_lines() -> list[str]:
        return [
            log.message
            for log in client.read_logs(of_this_run, 200, 0)
            if log.name.startswith("sem")
        ]

    until(lambda: any("generate: 180 of 180 images" in text for text in log_lines()))
    assert len(log_lines()) == len(set(log_lines()))
    assert output.count("generate: 180 of 180 images") == 1
    assert output.count("sharpening of features: scale") == 1  # a worker said so


def test_prefects_pages_show_progress_numbers_and_series(executed, artifacts_of, latest_artifact):
    run, root, _ = executed
    key = artifact_key("build", root.url, root.plan.digest)
    assert key.startswith("semix-build-mixed-ne-") and len(key) == len("semix-build-mixed-ne-") + 8
    artifacts = artifacts_of(run.id)
    assert {name: item["type"] for name, item in artifacts.items()} == {
        key: "progress",
        f"{key}-summary": "table",
        f"{key}-series": "markdown",
    }
    assert artifacts[key]["data"] == 100.0
    assert artifacts[key]["description"].startswith("180 of 180 images")
    rows = {row["what"]: row["value"] for row in json.loads(artifacts[f"{key}-summary"]["data"])}
    assert rows["shards"] == "8 of 8, 8 in this run"
    assert rows["images"] == "180 of 180, 180 in this run"
    assert rows["made in this run"] == "0-7" and "reused" not in rows
    assert f"plan {root.plan.digest[:12]}; generator " in rows["lineage"].replace("\\", "")
    assert {"this run", "one worker", "images generated", "images encoded"} <= set(rows)
    sheet = artifacts[f"{key}-series"]["data"]
    assert sheet.startswith("![series ") and "](data:image/webp;base64," in sheet
    assert len(sheet) < 150_000
    latest = latest_artifact(f"{key}-series")
    assert latest["flow_run_id"] == str(run.id)


def test_a_run_of_a_command_line_can_be_cancelled_in_prefect(
    client, hasty_config, prefect_api, tmp_path, until
):
    long_build = load_settings(
        BuildConfig, hasty_config.model_dump(), ["mixing.groups_per_pair=40", "generator.steps=20"]
    )
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(long_build.model_dump(mode="json")))
    command = [sys.executable, "-m", "semix.flows.cli", "build", "many.yaml", "--out", "cancelled"]
    environment = {**os.environ, "PREFECT_API_URL": prefect_api, "PYTHONPATH": str(CHECKOUT)}
    with (tmp_path / "log").open("w") as log:
        build = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    until(lambda: list(tmp_path.glob("cancelled/shards/*/*.json")), timeout_s=120)
    name = FlowRunFilter(name=FlowRunFilterName(any_=["build cancelled"]))
    (run,) = client.read_flow_runs(flow_run_filter=name)
    client.set_flow_run_state(run.id, Cancelling())  # as the button on the run's page does
    log_text = (tmp_path / "log").read_text
    assert build.wait(120) == 1, log_text()
    assert f"this run in Prefect: {url_for(run)}" in log_text()
    assert "error: cancelled in Prefect; committed work stays" in log_text()
    assert client.read_flow_run(run.id).state.is_cancelled()
    root = Root(str(tmp_path / "cancelled"))
    assert root.missing() and damage(root, full=True) == []
    assert root.store.list("leases") == []  # its worker was asked to end, and has


# Real flows on a real server; workers are real processes


@pytest.fixture(scope="module")
def failed_build(hasty_config, prefect_api, tmp_path_factory):
    """A root where one shard could not be written, and the message of its build's error."""
    root = create_root(hasty_config, str(tmp_path_factory.mktemp("broken") / "mixed"))
    obstacle = Path(root.url) / "shards/0000/0000003.json"  # where its commit record goes
    obstacle.mkdir(parents=True)
    with pytest.raises(BuildFailed) as caught:
        build(hasty_config, root.url, slots=1)
    obstacle.rmdir()
    return root, str(caught.value)


def test_one_failing_shard_stops_no_other_and_is_named(failed_build):
    root, message = failed_build
    assert root.missing() == [3]
    assert list(root.failures()) == [3]
    summary, reason, *advice = message.splitlines()
    assert summary == "1 of 8 shards not made: 3"
    assert reason.startswith("shard 3: ")
    assert advice == [
        f"all reasons: semix failures {root.url}",
        f"all other shards are safe; go on with: semix resume {root.url}",
    ]


def test_prefect_shows_the_run_its_log_and_its_end(
    failed_build, latest_artifact, until, ended_tasks
):
    root, _ = failed_build
    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(limit=1, sort="START_TIME_DESC")[0]
        assert run.name == "build mixed"
        assert set(run.tags) == {"semix", "build"}
        assert run.flow_version == version(DISTRIBUTION)
        assert run.state.is_failed()
        assert "1 of 8 shards not made: 3" in run.state.message
        assert sorted(ended_tasks(run.id, 2)) == ["generate slot 0", "plan"]
        of_this_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        until(
            lambda: any(
                log.message.startswith("shard 7: ") for log in client.read_logs(of_this_run, 200, 0)
            )
        )
        key = artifact_key("build", root.url, root.plan.digest)
        artifact = latest_artifact(key)
        assert artifact["flow_run_id"] == str(run.id)
        assert artifact["description"].startswith("156 of 180 images, 1 failed shard")


def test_resume_makes_what_is_missing_and_pins_it(failed_build):
    root, _ = failed_build
    before = committed(root)
    assert resume(root, slots=1).missing() == []
    assert {k: v for k, v in committed(root).items() if k != 3} == before
    assert root.indices() == ["index/0.json"]
    assert damage(root, full=True) == []
