"""Triggers, retries, resume and the command line; nothing below imports Prefect."""

import os

if __name__ != "semix.flows":
    raise ImportError(
        f"{__name__} is imported as semix.flows; a deployment whose entry point begins with "
        "`flows.` is of an earlier version: deploy it anew, `prefect --no-prompt deploy --all`"
    )

# Read once, when Prefect and torch are imported, here and in the processes started from here.
# A user's own settings win.
os.environ.setdefault("DO_NOT_TRACK", "1")
# What Prefect's console would say, semix says in its own words; run logs still reach the server.
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
# Server, workers and trainers share cores. Threads that spin while they wait make two busy
# processes on two cores ten times slower than threads that sleep (measured, torch on libgomp).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
