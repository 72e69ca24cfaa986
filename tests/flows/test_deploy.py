"""Deployments on a real server; what its workers make of them is in tests/integration."""

import re
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.importtools import import_object

from data.errors import InputError
from flows.commands.deploying import deploy as command
from flows.deployments import DeploySettings, deploy
from flows.deployments.automations import ensure_automations
from flows.deployments.catalogue import FLOWS
from flows.deployments.pools import ENVIRONMENT
from flows.deployments.settings import TYPES, check_settings, pairs
from flows.places import check_places

ROOT = Path(__file__).parents[2]
KINDS = ["build", "relabel", "train", "evaluate", "study", "quickstart"]


@pytest.fixture(scope="module")
def client(prefect_api):
    with get_client(sync_client=True) as client:
        yield client


def one(pool: str, *, kind: str = "build", **settings) -> DeploySettings:
    return DeploySettings(pool=pool, flows=(kind,), create_pool=True, **settings)


@pytest.fixture(scope="module")
def first(client):
    return deploy(DeploySettings(pool="all", create_pool=True))


def test_all_flows_are_registered_once_however_often_it_is_asked(first, client):
    ids = [client.read_deployment_by_name(found.name).id for found in first]
    again = deploy(DeploySettings(pool="all"))
    assert [found.name for found in first] == [f"semix-{kind}/all" for kind in KINDS]
    assert [found.done for found in first + again] == ["created"] * 6 + ["updated"] * 6
    assert [client.read_deployment_by_name(found.name).id for found in again] == ids


def test_what_a_deployment_says_of_itself(first, client):
    stored = client.read_deployment_by_name("semix-build/all")
    assert stored.entrypoint == "flows.build_flow.build_flow"
    assert (stored.pull_steps, stored.path) == (None, None)  # nothing is fetched
    assert (stored.work_pool_name, stored.work_queue_name) == ("all", "default")
    assert stored.tags == ["semix", "build"]
    assert re.match(r"\d+\.\d+", stored.version)
    assert stored.job_variables == {"env": ENVIRONMENT}
    assert stored.parameters == {}
    assert "mixed dataset" in stored.description
    explained = stored.parameter_openapi_schema["properties"]
    assert all("description" in explained[name] for name in explained)


@pytest.mark.parametrize("kind", KINDS)
def test_every_entrypoint_is_a_flow_of_that_name(kind):
    flow = import_object(FLOWS[kind].entrypoint)
    assert isinstance(flow, Flow)
    assert flow.name == FLOWS[kind].flow_name
    assert FLOWS[kind].example.keys() <= set(flow.parameters.properties)


def test_the_command_of_a_run_takes_what_the_flow_needs(first):
    commands = {found.name: found.run for found in first}
    assert commands["semix-build/all"] == (
        "prefect deployment run semix-build/all -p config=/data/build.yaml -p out=/data/mixed"
    )
    for kind in KINDS:
        needed = import_object(FLOWS[kind].entrypoint).parameters.required or []
        assert all(f" {name}=" in f" {commands[f'semix-{kind}/all']}" for name in needed)


def test_the_command_ends_with_the_table_and_lines_to_go_on(first, capsys):
    command(pool="all", flow=["evaluate"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["semix-evaluate/all", "all", "process", "none", "updated"]
    assert shown[-3:] == [
        "  prefect worker start --pool all --type process",
        "a run, with your own places:",
        "  prefect deployment run semix-evaluate/all -p run=/data/runs/csm",
    ]


def test_a_missing_pool_is_named_with_the_command_that_makes_it(client):
    remedy = r"`prefect work-pool create nowhere --type docker`, or add --create-pool"
    with pytest.raises(InputError, match=rf"^--pool = nowhere: .*no such work pool; {remedy}"):
        deploy(DeploySettings(pool="nowhere", type="docker"))


def test_a_pool_of_another_type_is_named(first):
    with pytest.raises(InputError, match=r"^--type = docker: the pool all is of type process"):
        deploy(DeploySettings(pool="all", type="docker"))


def test_without_a_server_the_remedy_is_one_that_stays(prefect_api):
    remedy = r"^PREFECT_API_URL = \(not set\): .*`semix server`"
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(InputError, match=remedy):
        deploy(DeploySettings())


def test_a_server_that_does_not_answer_is_named(prefect_api):
    url, text = "http://127.0.0.1:9/api", r"^PREFECT_API_URL = http://127\.0\.0\.1:9/api: no "
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(InputError, match=text):
        deploy(DeploySettings())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"flows": ("biuld",)}, r"--flow = biuld: no such flow; did you mean build\?"),
        ({"type": "slurm"}, r"--type = slurm: use one of process, docker, kubernetes"),
        ({"device": "tpu"}, r"--device = tpu: use one of auto, cpu, cuda"),
        ({"name": "a/b"}, r"--name = a/b: a deployment's name has no /"),
        ({"schedules": ("0 2 * * *",)}, r"--schedule = 0 2 .*: one flow at a time"),
        ({"schedules": ("nightly",), "flows": ("build",)}, r"--schedule = nightly: is no cron"),
        (
            {"schedules": ("0 2 * * *",), "flows": ("build",), "timezone": "Mars"},
            r"--timezone = Mars: no such time zone",
        ),
    ],
)
def test_bad_settings_are_named_before_any_server_is_asked(settings, text):
    with pytest.raises(InputError, match=f"^{text}"):
        check_settings(DeploySettings(**settings))


@pytest.mark.parametrize("text", ["slots", "=3", "slots=[1"])
def test_a_value_that_cannot_be_read_is_named(text):
    with pytest.raises(
        InputError, match=r"^--set-parameter = .*: (write it as|cannot be read as YAML)"
    ):
        pairs("--set-parameter", [text])


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"slotss": 2}, r"slotss: no such parameter of semix-build; did you mean slots\?"),
        ({"slots": "two"}, r"slots=two: 'two' is not of type 'integer'"),
        ({"runner": "slurm"}, r"runner=slurm: 'slurm' is not one of"),
    ],
)
def test_a_parameter_that_the_flow_does_not_take_is_named(client, parameters, text):
    with pytest.raises(InputError, match=f"^--set-parameter = {text}"):
        deploy(one("all", parameters=parameters))


def test_parameters_and_the_device_become_defaults(client):
    deploy(one("gpu", device="cuda", parameters={"out": "/data/mixed", "slots": 2}))
    stored = client.read_deployment_by_name("semix-build/gpu")
    assert stored.parameters == {"out": "/data/mixed", "slots": 2, "device": "cuda"}
    assert "out=" not in deploy(one("gpu", parameters={"out": "/data/mixed"}))[0].run


def test_a_schedule_must_start_runs_that_lack_nothing(client):
    with pytest.raises(InputError, match=r"^--schedule = 0 2 .*lack out; add --set-parameter out="):
        deploy(one("nightly", schedules=("0 2 * * *",)))


def test_a_schedule_is_set_once_replaced_when_given_and_else_kept(client):
    settings = {"parameters": {"out": "/data/mixed"}, "timezone": "Europe/Berlin"}
    for lines in [("0 2 * * *",), ("0 2 * * *",), ("0 3 * * *", "0 15 * * 0"), ()]:
        found = deploy(one("nightly", schedules=lines, **settings))
    assert sorted(found[0].schedules) == ["0 15 * * 0", "0 3 * * *"]
    stored = client.read_deployment_by_name("semix-build/nightly")
    assert {one.schedule.timezone for one in stored.schedules} == {"Europe/Berlin"}
    # A night that finds the last one at work is left out.
    assert stored.global_concurrency_limit.limit == 1
    assert stored.concurrency_options.collision_strategy == "CANCEL_NEW"


def test_a_limit_makes_further_runs_wait(client):
    deploy(one("few", limit=2, queue="gpus"))
    stored = client.read_deployment_by_name("semix-build/few")
    assert (stored.global_concurrency_limit.limit, stored.work_queue_name) == (2, "gpus")
    assert stored.concurrency_options is None or (
        stored.concurrency_options.collision_strategy == "ENQUEUE"
    )


def test_a_paused_deployment_stays_paused(client):
    deploy(one("paused"))
    found = client.read_deployment_by_name("semix-build/paused")
    client.request("POST", f"/deployments/{found.id}/pause_deployment")
    deploy(one("paused"))
    assert client.read_deployment_by_name("semix-build/paused").paused


def test_containers_need_an_image_and_processes_take_none(client):
    with pytest.raises(InputError, match=r"^--image = \(none\): runs of a docker pool need one"):
        deploy(one("boats", type="docker"))
    with pytest.raises(InputError, match=r"^--pool = boats: .*no such work pool"):
        deploy(DeploySettings(pool="boats", type="docker"))
    with pytest.raises(InputError, match=r"^--image = semix:cpu: the pool all runs processes"):
        deploy(one("all", image="semix:cpu"))


def test_docker_containers_get_image_memory_and_gpus(client):
    deploy(one("boats", type="docker", image="semix:cuda", device="cuda"))
    got = client.read_deployment_by_name("semix-build/boats").job_variables
    assert got["image"] == "semix:cuda"
    gpus = {"count": -1, "capabilities": [["gpu"]]}
    assert got["container_create_kwargs"] == {"shm_size": "2g", "device_requests": [gpus]}
    template = client.read_work_pool("boats").base_job_template
    assert "container_create_kwargs" in template["job_configuration"]


def test_kubernetes_pods_get_gpus_memory_and_a_secret(client):
    given = {"gpus": 8, "namespace": "mixing", "env": {"AWS_REGION": "eu-central-1"}}
    settings = {"image": "semix:cuda", "device": "cuda", "job_variables": given}
    deploy(one("pods", type="kubernetes", **settings))
    got = client.read_deployment_by_name("semix-build/pods").job_variables
    assert (got["gpus"], got["namespace"]) == (8, "mixing")
    assert got["env"] == ENVIRONMENT | {"AWS_REGION": "eu-central-1"}
    template = client.read_work_pool("pods").base_job_template
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    assert pod["containers"][0]["envFrom"][0]["secretRef"]["name"] == "{{ secret }}"
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_a_pool_without_a_place_for_gpus_is_named(client):
    from prefect.client.schemas.actions import WorkPoolCreate

    known = client.read_worker_metadata()["prefect-kubernetes"]["kubernetes"]
    template = known["default_base_job_configuration"]
    client.create_work_pool(
        WorkPoolCreate(name="plain", type="kubernetes", base_job_template=template)
    )
    deploy(one("plain", image="semix:cpu"))
    with pytest.raises(InputError, match=r"^--device = cuda: .* plain has no place for GPUs"):
        deploy(one("plain", image="semix:cuda", device="cuda"))


def test_a_variable_that_the_pool_does_not_know_is_named(client):
    text = r"^--job-variable = working_di: no such variable .*; did you mean working_dir\?"
    with pytest.raises(InputError, match=text):
        deploy(one("all", job_variables={"working_di": "/data"}))


def test_an_environment_that_is_none_is_named(client):
    with pytest.raises(InputError, match=r"^--job-variable = env=3: write it as 'env="):
        deploy(one("all", job_variables={"env": 3}))


def test_a_server_that_evaluates_no_automations_is_named(client):
    with pytest.raises(InputError, match=r"TRIGGERS_ENABLED = false: this server evaluates no"):
        ensure_automations(client)


def test_relative_places_are_refused_in_a_run_of_a_deployment():
    check_places({"out": "/data/mixed", "config": "s3://bucket/build.yaml", "slots": 2, "url": ""})
    with pytest.raises(InputError, match=r"^out = mixed: .*new folder.*; give a whole path"):
        check_places({"out": "mixed"})


@pytest.mark.parametrize("kind", TYPES)
def test_prefect_yaml_says_the_same(kind, client):
    """`prefect deploy` registers what `semix deploy` does; the real command is in integration."""
    pool = "semix" if kind == TYPES[0] else f"semix-{kind}"
    image = "" if kind == TYPES[0] else "semix:cpu"
    deploy(DeploySettings(pool=pool, type=kind, image=image, create_pool=True))
    file = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    assert file["pull"] == []
    written = [one for one in file["deployments"] if one["name"] == pool]
    assert len(written) == len(KINDS)
    for given in written:
        stored = client.read_deployment_by_name(f"semix-{given['tags'][-1]}/{pool}")
        assert (given["entrypoint"], given["tags"]) == (stored.entrypoint, stored.tags)
        assert given["work_pool"]["name"] == stored.work_pool_name
        variables = dict(given["work_pool"]["job_variables"])
        if image:
            assert variables.pop("image") == "{{ $SEMIX_IMAGE }}"
            variables["image"] = image
        assert variables == stored.job_variables
