"""Work pools: found or made, and what a flow's job gets from one."""

from typing import TYPE_CHECKING, Any

from data.errors import InputError
from flows.deployments.settings import TYPES, DeploySettings, no_such
from flows.deployments.templates import ALL_GPUS, SHARED_MEMORY, variables, with_our_places

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import WorkPool

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    # The shortest that Prefect takes; what stops beating for minutes is marked as crashed.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "TQDM_DISABLE": "1",
}


def ready_pool(client: "SyncPrefectClient", settings: DeploySettings) -> "WorkPool":
    """The pool to deploy on.

    Raises:
        InputError: there is none, or it is of another type than asked for or than we serve.
    """
    from prefect.exceptions import ObjectNotFound

    try:
        pool = client.read_work_pool(settings.pool)
    except ObjectNotFound:
        kind = settings.type or TYPES[0]
        if settings.create_pool:
            _check_image(kind, settings)
            return _created(client, settings.pool, kind)
        command = f"prefect work-pool create {settings.pool} --type {kind}"
        remedy = f"the server has no such work pool; `{command}`, or add --create-pool"
        raise InputError("--pool", settings.pool, remedy) from None
    if settings.type and pool.type != settings.type:
        remedy = f"the pool {pool.name} is of type {pool.type}; choose another --pool or --type"
        raise InputError("--type", settings.type, remedy)
    if pool.type not in TYPES:
        remedy = f"is of type {pool.type}; semix deploys on {', '.join(TYPES)}"
        raise InputError("--pool", pool.name, remedy)
    return pool


def _created(client: "SyncPrefectClient", name: str, kind: str) -> "WorkPool":
    from prefect.client.schemas.actions import WorkPoolCreate

    known = client.read_worker_metadata()
    worker = next(types[kind] for types in known.values() if kind in types)
    template = with_our_places(worker["default_base_job_configuration"], kind)
    return client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template))


def job_variables(pool: "WorkPool", settings: DeploySettings) -> dict[str, Any]:
    """What jobs get in this pool.

    Raises:
        InputError: containers without an image, an image without containers, a GPU or another
            variable that the pool's base job template has no place for.
    """
    _check_image(pool.type, settings)
    found: dict[str, Any] = {"env": ENVIRONMENT}
    if settings.image:
        found["image"] = settings.image
    if settings.device == "cuda":
        found |= _gpu(pool.type)
    given = dict(settings.job_variables)
    further = given.pop("env", {})
    if not isinstance(further, dict):
        remedy = "write it as 'env={NAME: VALUE}'"
        raise InputError("--job-variable", f"env={further}", remedy)
    environment = {**ENVIRONMENT, **further}
    found |= given | {"env": {key: str(value) for key, value in environment.items()}}
    _check_places(pool, found)
    return found


def _check_image(kind: str, settings: DeploySettings) -> None:
    containers = kind != TYPES[0]
    if containers and not settings.image:
        remedy = f"runs of a {kind} pool need one that semix is installed in; give --image"
        raise InputError("--image", "(none)", remedy)
    if settings.image and not containers:
        remedy = f"the pool {settings.pool} runs processes, not containers; leave it out"
        raise InputError("--image", settings.image, remedy)


def _gpu(kind: str) -> dict[str, Any]:
    if kind == "docker":
        own = {"shm_size": SHARED_MEMORY, "device_requests": [ALL_GPUS]}
        return {"container_create_kwargs": own}
    return {"gpus": 1} if kind == "kubernetes" else {}


def _check_places(pool: "WorkPool", found: dict[str, Any]) -> None:
    known = variables(pool.base_job_template)
    for name in found.keys() - known.keys():
        if name in ("gpus", "container_create_kwargs"):
            remedy = (
                f"the base job template of the pool {pool.name} has no place for GPUs ({name}); "
                "make a pool with --create-pool, whose template has"
            )
            raise InputError("--device", "cuda", remedy)
        what = f"variable in the base job template of the pool {pool.name}"
        raise InputError("--job-variable", name, no_such(what, name, known))
