"""Run the command line in this process: exit status, standard output, standard error."""

import io
import logging
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from semix.flows import cli


def semix(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run `semix ARGUMENTS`, then restore this process's logging and signals."""
    logger, sigterm_handler = logging.getLogger("semix"), signal.getsignal(signal.SIGTERM)
    logger_state = {name: getattr(logger, name) for name in ("handlers", "level", "propagate")}
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "200", **environment}),
        mock.patch.object(sys, "argv", ["semix", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, sigterm_handler)
            logger.__dict__.update(logger_state)
    return status, out.getvalue(), err.getvalue()
