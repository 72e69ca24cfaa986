"""The files of deployments, pools and automations; their commands run in tests/integration."""

import json
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.utilities.importtools import import_object

from semix.data.errors import InputError
from semix.flows.paths import check_places

ROOT = Path(__file__).parents[2]
POOLS = {"prefect.yaml": ["semix"], "docker/prefect.yaml": ["semix-docker", "semix-kubernetes"]}
KINDS = ["build", "relabel", "train", "evaluate", "study", "loop", "quickstart"]


def read(name: str):
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", POOLS)
def test_every_flow_is_deployed_once_a_pool(name):
    file = read(name)
    assert (file["build"], file["pull"]) == ([], [])  # nothing is built or fetched
    for pool in POOLS[name]:
        deployments = [entry for entry in file["deployments"] if entry["work_pool"]["name"] == pool]
        assert [entry["tags"] for entry in deployments] == [["semix", kind] for kind in KINDS]
        for entry, kind in zip(deployments, KINDS, strict=True):
            flow = import_object(entry["entrypoint"])
            assert isinstance(flow, Flow)
            assert (entry["name"], flow.name) == (pool, f"semix-{kind}")
    assert len(file["deployments"]) == len(KINDS) * len(POOLS[name])


def test_runs_of_all_pools_beat_and_containers_have_an_image():
    pools = [entry["work_pool"] for name in POOLS for entry in read(name)["deployments"]]
    environments = [pool["job_variables"]["env"] for pool in pools]
    assert all(entry == environments[0] for entry in environments)
    assert environments[0]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    images = {pool["name"]: pool["job_variables"].get("image") for pool in pools}
    image = "{{ $SEMIX_IMAGE }}"
    assert images == {"semix": None, "semix-docker": image, "semix-kubernetes": image}


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_a_pool_has_prefects_own_variables_and_ours(kind, prefect_api):
    template = json.loads((ROOT / "docker/pools" / f"{kind}.json").read_text())
    with get_client(sync_client=True) as client:
        client.create_work_pool(
            WorkPoolCreate(name=f"shipped-{kind}", type=kind, base_job_template=template)
        )
        metadata = client.read_worker_metadata()[f"prefect-{kind}"][kind]
    prefect_template = metadata["default_base_job_configuration"]
    assert prefect_template["job_configuration"].keys() <= template["job_configuration"].keys()
    added = (
        template["variables"]["properties"].keys()
        - prefect_template["variables"]["properties"].keys()
    )
    assert (
        prefect_template["variables"]["properties"].keys()
        <= template["variables"]["properties"].keys()
    )
    assert added <= {"container_create_kwargs", "gpus", "shared_memory", "secret"}
    text = json.dumps(template["job_configuration"])
    assert all(f'"{{{{ {name} }}}}"' in text for name in template["variables"]["properties"])


def test_containers_get_gpus_and_shared_memory():
    docker, kubernetes = (
        json.loads((ROOT / "docker/pools" / f"{kind}.json").read_text())
        for kind in ("docker", "kubernetes")
    )
    settings = docker["variables"]["properties"]["container_create_kwargs"]
    assert settings["default"] == {"shm_size": "2g"}
    pod = kubernetes["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    assert container["envFrom"] == [{"secretRef": {"name": "{{ secret }}", "optional": True}}]
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "{{ shared_memory }}"}


def test_automations_are_of_flows_that_are_there():
    definitions = read("docker/automations.yaml")["automations"]
    automations = [AutomationCore.model_validate(entry) for entry in definitions]
    assert [entry.name.partition(": ")[2] for entry in automations] == [
        "resume builds that failed",
        "stop resuming",
        "crash runs without a heartbeat",
    ]
    names = [entry.trigger.match_related[0].root["prefect.resource.name"] for entry in automations]
    assert names == [["semix-build", "semix-relabel"]] * 2 + [["semix-*"]]


def test_relative_places_are_refused_in_a_run_of_a_deployment():
    check_places({"out": "/data/mixed", "config": "", "slots": 2, "url": "s3://bucket/mixed"})
    with pytest.raises(InputError, match=r"^out = mixed: .*new folder.*; give an absolute path"):
        check_places({"out": "mixed"})


@pytest.mark.parametrize(
    ("text", "overrides", "field", "value"),
    [
        ("real: {name: imagefolder, path: birds}", [], "real.path", "birds"),
        ("mixed: {url: mixed}", [], "mixed.url", "mixed"),
        ("generator: {model: ../models/sd}", [], "generator.model", "../models/sd"),
        ("annotation: {model: 'local-dir:clip'}", [], "annotation.model", "local-dir:clip"),
        ("evaluation: {ood: {cats: {path: cats}}}", [], "evaluation.ood.cats.path", "cats"),
        ("base: {real: {path: a}}", [], "base.real.path", "a"),
        ("real: {path: /birds}", ["real.path=./b"], "real.path", "./b"),
    ],
)
def test_so_are_those_of_its_config_and_its_overrides(text, overrides, field, value, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(InputError, match=r"new folder.*; give an absolute path") as caught:
        check_places({"config": str(config), "overrides": overrides})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_whole_places_and_models_of_the_hub_pass_in_a_config(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "real: {name: imagefolder, path: /birds}\nmixed: {url: 's3://bucket/mixed'}\n"
        "generator: {model: owner/model}\nannotation: {model: 'local-dir:/clip'}\n"
    )
    check_places({"config": str(config), "overrides": ["generator.unet=owner/unet", "a.b=1"]})
