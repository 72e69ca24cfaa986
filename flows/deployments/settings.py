"""What `semix deploy` is asked for; whatever needs no server is checked here."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from data.errors import InputError
from data.settings import read_yaml
from flows.deployments.catalogue import FLOWS
from flows.slots.settings import DEVICES

POOL = "semix"
TYPES = ("process", "docker", "kubernetes")


@dataclass(frozen=True)
class DeploySettings:
    """Deployments to register.

    Attributes:
        pool: work pool that runs them.
        type: of the pool; empty takes what the pool is, and process for a new one.
        flows: kinds, as build; empty for all.
        name: of the deployments; empty for the pool's.
        queue: work queue of the pool; empty for its default one.
        image: of the containers, where the pool makes containers.
        device: what the networks run on unless a run says otherwise.
        parameters: values that runs have unless they say otherwise.
        job_variables: values for the pool's base job template, over ours.
        schedules: cron lines, in `timezone`.
        limit: runs of one deployment at a time, further ones wait; 0 for no limit.
        create_pool: make the pool if there is none of that name.
    """

    pool: str = POOL
    type: str = ""
    flows: tuple[str, ...] = ()
    name: str = ""
    queue: str = ""
    image: str = ""
    device: str = "auto"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    job_variables: Mapping[str, Any] = field(default_factory=dict)
    schedules: tuple[str, ...] = ()
    timezone: str = "UTC"
    limit: int = 0
    create_pool: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.flows)) or tuple(FLOWS)


def check_settings(settings: DeploySettings) -> None:
    """Raises InputError for an unknown flow, pool type or device, or schedules that cannot be."""
    for kind in settings.kinds:
        if kind not in FLOWS:
            raise InputError("--flow", kind, no_such("flow", kind, FLOWS))
    if settings.type and settings.type not in TYPES:
        raise InputError("--type", settings.type, f"use one of {', '.join(TYPES)}")
    if settings.device not in DEVICES:
        raise InputError("--device", settings.device, f"use one of {', '.join(DEVICES)}")
    if "/" in settings.name or "%" in settings.name:
        raise InputError("--name", settings.name, "a deployment's name has no / and no %")
    if not settings.schedules:
        return
    if len(settings.kinds) > 1:
        remedy = "one flow at a time has a schedule; add --flow build, or another"
        raise InputError("--schedule", settings.schedules[0], remedy)
    _check_times(settings)


def pairs(option: str, texts: Iterable[str]) -> dict[str, Any]:
    """Values of KEY=VALUE texts, read as YAML.

    Raises:
        InputError: a text without `=` or key, or a value that is not YAML.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(option, text, "write it as KEY=VALUE")
        try:
            values[key] = read_yaml(value)
        except ValueError as error:
            raise InputError(option, key, f"cannot be read as YAML: {error}") from None
    return values


def no_such(what: str, given: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not among the known ones."""
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1)
    return f"no such {what}; " + (f"did you mean {near[0]}?" if near else f"use {', '.join(known)}")


def _check_times(settings: DeploySettings) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    try:
        ZoneInfo(settings.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        remedy = "no such time zone; write it as Europe/Berlin"
        raise InputError("--timezone", settings.timezone, remedy) from None
    for line in settings.schedules:
        try:
            CronSchedule(cron=line, timezone=settings.timezone)
        except ValueError:
            remedy = 'is no cron line; for every night at two write "0 2 * * *"'
            raise InputError("--schedule", line, remedy) from None
