"""What our pools add to Prefect's base job templates: GPUs, shared memory, secrets."""

import copy
from typing import Any

# Docker gives a container 64 MB of shared memory, and torch's data loaders need more.
SHARED_MEMORY = "2g"
ALL_GPUS = {"count": -1, "capabilities": [["gpu"]]}
# Of it a trainer has 120 s to end its step and write a checkpoint.
TERMINATION_S = 150

Template = dict[str, Any]


def with_our_places(template: Template, kind: str) -> Template:
    """A base job template of Prefect's with places for what semix needs.

    Args:
        kind: process, docker or kubernetes.
    """
    template = copy.deepcopy(template)
    if kind == "docker":
        _add_container_settings(template)
    if kind == "kubernetes":
        _add_pod_settings(template)
    return template


def variables(template: Template) -> dict[str, Any]:
    """The job variables that a template has a place for, by name."""
    found: dict[str, Any] = template.get("variables", {}).get("properties", {})
    return found


def _add_container_settings(template: Template) -> None:
    """Prefect's Docker worker knows `container_create_kwargs`; its stored template lacks it."""
    template["job_configuration"]["container_create_kwargs"] = "{{ container_create_kwargs }}"
    variables(template)["container_create_kwargs"] = {
        "title": "Container Settings",
        "description": "Further arguments of docker-py's containers.create, as shm_size or "
        "device_requests.",
        "type": "object",
        "default": {"shm_size": SHARED_MEMORY},
    }


def _add_pod_settings(template: Template) -> None:
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = TERMINATION_S
    pod["volumes"] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "{{ shared_memory }}"}}
    ]
    container = pod["containers"][0]
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    # Optional: a pod starts where there is no such secret, as with a service account's rights.
    container["envFrom"] = [{"secretRef": {"name": "{{ secret }}", "optional": True}}]
    container["resources"]["limits"]["nvidia.com/gpu"] = "{{ gpus }}"
    variables(template).update(
        gpus={
            "title": "GPUs",
            "description": "GPUs of a run's pod; without it the pod gets none.",
            "type": "integer",
            "minimum": 1,
        },
        shared_memory={
            "title": "Shared Memory",
            "description": "Size of the pod's /dev/shm.",
            "type": "string",
            "default": "2Gi",
        },
        secret={
            "title": "Secret",
            "description": "Kubernetes secret whose keys become environment variables.",
            "type": "string",
            "default": "semix",
        },
    )
