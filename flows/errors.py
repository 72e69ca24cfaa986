"""The errors that mean: the input was fine, the run was not finished."""


class RunFailed(RuntimeError):
    """Part of a run failed. The text says what, why, and how to go on.

    Args:
        exit_status: of `semix`; 2 if a child process found fault with the input after all.
    """

    def __init__(self, text: str, *, exit_status: int = 1) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class RunCancelled(RunFailed):
    """Somebody cancelled the run in Prefect."""
