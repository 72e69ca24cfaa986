"""Automations of a Prefect server: builds that failed go on, runs without a heartbeat crash.

Each acts on runs of semix deployments alone. A run that is resumed is the same run again, with the
same parameters; which shards are done its store says.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from data.errors import InputError

if TYPE_CHECKING:
    from prefect.automations import Automation
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events import EventTrigger

RESUME, STOP, ZOMBIES = (
    f"semix: {what}"
    for what in ("resume builds that failed", "stop resuming", "crash runs without a heartbeat")
)
RESUMABLE = ["semix-build", "semix-relabel"]  # flows whose same call again goes on
TIMES = 3
# A worker reports a dead process once more after the first report: resuming must come later.
AFTER_S = 30.0
# Runs beat every 30 s; a server that restarts may miss some of it.
SILENCE_S = 300.0
RETRY_STATE = "AwaitingRetry"  # Prefect's own name of it


def ensure_automations(
    client: "SyncPrefectClient",
    *,
    times: int = TIMES,
    after_s: float = AFTER_S,
    silence_s: float = SILENCE_S,
) -> dict[str, str]:
    """Create the automations, or make those of these names what they should be.

    Args:
        times: how often a run is resumed.
        after_s: from a failure to its resumption; Prefect takes no less than 10.
        silence_s: without a heartbeat, until a run counts as crashed.
    Returns:
        What was done with each: created, updated or kept.
    Raises:
        InputError: the server evaluates no automations.
    """
    _check_served(client)
    wanted = (
        resume_on_failure(times=times, after_s=after_s),
        stop_resuming(times=times),
        crash_zombies(silence_s=silence_s),
    )
    return {automation.name: _ensure(client, automation) for automation in wanted}


def resume_on_failure(*, times: int = TIMES, after_s: float = AFTER_S) -> "Automation":
    """Schedules a run again that failed or crashed at one of its first attempts.

    Not one that was refused its input: that would be refused again.
    """
    from prefect.automations import Automation, ChangeFlowRunState, Posture
    from prefect.client.schemas.objects import StateType

    trigger = _trigger(
        RESUMABLE,
        after=_events("Failed", "Crashed"),
        expect=_events(
            *("Scheduled", RETRY_STATE, "Pending", "Running", "Paused"),
            *("Cancelling", "Cancelled", "Completed"),
        ),
        posture=Posture.Proactive,
        within_s=after_s,
        match={
            "prefect.run-count": [str(count) for count in range(1, times + 1)],
            "prefect.state-message": "!*: InputError: *",
        },
    )
    again = ChangeFlowRunState(
        state=StateType.SCHEDULED,
        name=RETRY_STATE,
        message=f"semix goes on with what the store lacks; at most {times} times",
    )
    return Automation(
        name=RESUME,
        description=f"Runs a semix build or relabelling again, {after_s:.0f} s after it failed or "
        f"crashed, at most {times} times.",
        trigger=trigger,
        actions=[again],
    )


def stop_resuming(*, times: int = TIMES) -> "Automation":
    """Cancels a run that is scheduled again and again without ever starting.

    Attempts that begin are counted by the run; those whose machine or image fails are not.
    """
    from prefect.automations import Automation, CancelFlowRun, Posture

    trigger = _trigger(
        RESUMABLE,
        expect=_events(RETRY_STATE),
        posture=Posture.Reactive,
        # One failure may be answered twice before its run is taken up.
        threshold=2 * times + 2,
        within_s=timedelta(days=7).total_seconds(),
    )
    return Automation(
        name=STOP,
        description="Cancels a semix run that was resumed again and again and never started.",
        trigger=trigger,
        actions=[CancelFlowRun()],
    )


def crash_zombies(*, silence_s: float = SILENCE_S) -> "Automation":
    """Marks runs whose machine died as crashed: nobody was left to say so."""
    from prefect.automations import Automation, ChangeFlowRunState, Posture
    from prefect.client.schemas.objects import StateType

    ends = ("Completed", "Failed", "Crashed", "Cancelling", "Cancelled")
    trigger = _trigger(
        ["semix-*"],
        after=_events("Running", "heartbeat"),
        expect=_events("heartbeat", RETRY_STATE, *ends),
        posture=Posture.Proactive,
        within_s=silence_s,
    )
    crash = ChangeFlowRunState(
        state=StateType.CRASHED,
        message=f"no heartbeat for {silence_s:.0f} s: its process or machine is gone",
    )
    return Automation(
        name=ZOMBIES,
        description=f"Marks a semix run as crashed that gave no heartbeat for {silence_s:.0f} s.",
        trigger=trigger,
        actions=[crash],
    )


def _trigger(
    flows: list[str],
    *,
    within_s: float,
    match: dict[str, Any] | None = None,
    **rules: Any,
) -> "EventTrigger":
    """A trigger that looks at each run of these flows for itself; only runs of deployments."""
    from prefect.automations import EventTrigger

    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*", **(match or {})},
        match_related=[
            {"prefect.resource.role": "flow", "prefect.resource.name": flows},
            {
                "prefect.resource.role": "deployment",
                "prefect.resource.id": "prefect.deployment.*",
            },
        ],
        for_each={"prefect.resource.id"},
        within=timedelta(seconds=within_s),
        **rules,
    )


def _events(*names: str) -> set[str]:
    return {f"prefect.flow-run.{name}" for name in names}


def _ensure(client: "SyncPrefectClient", wanted: "Automation") -> str:
    found = client.read_automations_by_name(wanted.name)
    for double in found[1:]:
        client.delete_automation(double.id)
    if not found:
        wanted.create()
        return "created"
    wanted.id = found[0].id
    ours = wanted.model_dump(exclude={"id", "owner_resource"})
    if found[0].model_dump(exclude={"id", "owner_resource"}) == ours:
        return "kept"
    wanted.update()
    return "updated"


def _check_served(client: "SyncPrefectClient") -> None:
    """Prefect Cloud has no such page, and always evaluates."""
    from prefect.client.base import ServerType

    if client.server_type == ServerType.CLOUD:
        return
    services = client.request("GET", "/admin/settings").json()["server"]["services"]
    if not services["triggers"]["enabled"]:
        remedy = "this server evaluates no automations; set it to true there, or leave them out"
        raise InputError("PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED", "false", remedy)
