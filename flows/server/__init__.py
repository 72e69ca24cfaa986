"""Prefect servers: the one of a run, the one that stays, and what their clients meet."""
