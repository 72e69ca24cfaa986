"""Slots: a task run each, one worker process after another, on this machine or a cluster."""
