"""Settings of the Prefect server that a run starts for itself."""

# The database may be the one a user's other flows live in: show runs, record them, and leave
# schedules, late runs, workers and automations to the server that user runs for them.
FOREIGN_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "FOREMAN",
    "PAUSE_EXPIRATIONS",
    "CANCELLATION_CLEANUP",
    "REPOSSESSOR",
    "TRIGGERS",
)
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # With its key alone a page from elsewhere must change nothing either.
    "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    # With batches of one, the default, task states trail the client by minutes.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "500",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in FOREIGN_SERVICES},
}
