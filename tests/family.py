"""The descendants of a process."""

import psutil


def below(pid: int, *words: str, direct: bool = False) -> list[psutil.Process]:
    """Living descendants of the process `pid` whose command line contains all `words`.

    Args:
        direct: only its children, not their descendants.
    """
    processes = []
    for process in psutil.Process(pid).children(recursive=not direct):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:  # it ended while we looked
            continue
        if line and all(word in line for word in words):
            processes.append(process)
    return processes
