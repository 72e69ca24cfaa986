"""Processes below another one."""

import psutil


def below(pid: int, *words: str, direct: bool = False) -> list[psutil.Process]:
    """Living processes below one, whose command line holds all these words.

    Args:
        direct: its own children alone.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=not direct):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:  # it ended while we looked
            continue
        if line and all(word in line for word in words):
            found.append(process)
    return found
