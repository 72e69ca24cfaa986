"""A deployment of one flow on a process pool of its own, as `prefect deploy` creates it."""

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.importtools import import_object


def register(kind: str, pool: str) -> None:
    """Create the deployment semix-KIND/POOL and its pool, on the server of Prefect's settings."""
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"), overwrite=True)
    RunnerDeployment.from_flow(
        import_object(f"semix.flows.{kind}_flow.{kind}_flow"),
        pool,
        work_pool_name=pool,
        entrypoint_type=EntrypointType.MODULE_PATH,
    ).apply()
