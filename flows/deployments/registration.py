"""Registers flows as Prefect deployments; the same call again updates them."""

import shlex
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from data.errors import InputError
from flows.deployments.catalogue import FLOWS, Deployable
from flows.deployments.pools import job_variables, ready_pool
from flows.deployments.settings import DeploySettings, check_settings, no_such
from flows.server.probe import require_server

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.deployments.runner import RunnerDeployment

TAG = "semix"
VERSION = version("semix")


@dataclass(frozen=True)
class Registered:
    """A deployment as it is on the server now.

    Attributes:
        name: FLOW/NAME, as `prefect deployment run` takes it.
        done: created or updated.
        run: a command that starts a first run; its places are examples.
    """

    name: str
    pool: str
    type: str
    queue: str
    schedules: tuple[str, ...]
    done: str
    run: str


def deploy(settings: DeploySettings) -> list[Registered]:
    """Register what is asked for on the configured server.

    Raises:
        InputError: no server, or one that cannot be used; no such pool; a flow, parameter or
            variable that there is not. No flow was registered.
    """
    check_settings(settings)
    require_server(configured_server())
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import VersionInfo
    from prefect.utilities.importtools import import_object

    wanted = [FLOWS[kind] for kind in settings.kinds]
    loaded = [(one, import_object(one.entrypoint)) for one in wanted]
    given = {one.kind: _parameters(flow, settings) for one, flow in loaded}
    with get_client(sync_client=True) as client:
        pool = ready_pool(client, settings)
        variables = job_variables(pool, settings)
        name = settings.name or pool.name
        found = []
        for one, flow in loaded:
            there = _stored(client, f"{one.flow_name}/{name}")
            deployment = _deployment(flow, name, settings, there=there)
            deployment.parameters = given[one.kind]
            deployment.job_variables = dict(variables)
            deployment.work_pool_name = pool.name
            # Without it Prefect would take the commit of whatever folder this runs in.
            deployment.apply(version_info=VersionInfo(type="prefect:simple", version=VERSION))
            found.append(_registered(client, one, deployment, pool.type, new=there is None))
    return found


def configured_server() -> str:
    """URL of the server in PREFECT_API_URL or Prefect's profile. Raises InputError without one."""
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        remedy = (
            "deployments live on a server that stays; start one with `semix server`, then set "
            "this to its address, as http://127.0.0.1:4200/api"
        )
        raise InputError("PREFECT_API_URL", "(not set)", remedy)
    return str(url)


def _parameters(flow: "Flow[..., Any]", settings: DeploySettings) -> dict[str, Any]:
    """Defaults of a deployment's runs, checked against the flow's schema.

    Raises:
        InputError: the flow has no such parameter, a value that it does not take, or a schedule
            would start runs that lack a parameter.
    """
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate

    schema = parameter_schema(flow).model_dump_for_openapi()
    values = dict(settings.parameters)
    for key in values:
        if key not in schema["properties"]:
            what = f"parameter of {flow.name}"
            raise InputError("--set-parameter", key, no_such(what, key, schema["properties"]))
    if "device" in schema["properties"] and settings.device != "auto":
        values.setdefault("device", settings.device)
    for problem in validate(values, schema, ignore_required=True):
        where = ".".join(map(str, problem.absolute_path))
        raise InputError("--set-parameter", f"{where}={problem.instance}", problem.message)
    lacking = [key for key in schema.get("required", ()) if key not in values]
    if settings.schedules and lacking:
        remedy = f"its runs would lack {lacking[0]}; add --set-parameter {lacking[0]}=VALUE"
        raise InputError("--schedule", settings.schedules[0], remedy)
    return values


def _deployment(
    flow: "Flow[..., Any]",
    name: str,
    settings: DeploySettings,
    *,
    there: "DeploymentResponse | None",
) -> "RunnerDeployment":
    """A deployment to apply; what a person set on the server's pages stays as it is `there`."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import RunnerDeployment
    from prefect.types.entrypoint import EntrypointType

    times = _schedules(settings, there)
    # A night that finds the last one at work leaves it at that: both would do the same.
    alone = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    return RunnerDeployment.from_flow(
        flow,
        name,
        schedules=times,
        concurrency_limit=settings.limit or (alone if times else None),
        paused=there.paused if there else False,
        tags=[TAG, flow.name.removeprefix("semix-")],
        version=VERSION,
        work_queue_name=settings.queue or None,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _schedules(settings: DeploySettings, there: "DeploymentResponse | None") -> list[Any]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.schedules import Cron

    if settings.schedules or there is None:
        return [Cron(line, timezone=settings.timezone) for line in settings.schedules]
    kept = {"schedule", "active", "parameters", "slug", "max_scheduled_runs"}
    return [
        DeploymentScheduleCreate(**{name: getattr(one, name) for name in kept})
        for one in there.schedules
    ]


def _stored(client: "SyncPrefectClient", name: str) -> "DeploymentResponse | None":
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _registered(
    client: "SyncPrefectClient",
    one: Deployable,
    deployment: "RunnerDeployment",
    pool_type: str,
    *,
    new: bool,
) -> Registered:
    stored = client.read_deployment_by_name(deployment.full_name)
    times = (getattr(found.schedule, "cron", "other") for found in stored.schedules)
    given = {key: value for key, value in one.example.items() if key not in stored.parameters}
    options = [word for key, value in given.items() for word in ("-p", f"{key}={value}")]
    return Registered(
        deployment.full_name,
        pool=stored.work_pool_name or "",
        type=pool_type,
        queue=stored.work_queue_name or "",
        schedules=tuple(times),
        done="created" if new else "updated",
        run=shlex.join(["prefect", "deployment", "run", deployment.full_name, *options]),
    )
