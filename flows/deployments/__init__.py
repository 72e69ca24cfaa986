"""The flows as Prefect deployments: `deploy` registers them on a work pool."""

from flows.deployments.registration import Registered, deploy
from flows.deployments.settings import DeploySettings

__all__ = ["DeploySettings", "Registered", "deploy"]
