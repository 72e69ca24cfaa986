"""Fuzz all targets with mutated inputs, in a process of bounded memory.

python -m tests.fuzz.drive --inputs 20000 --seed 0
python -m tests.fuzz.drive --kind shard --only 1234     one input again
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from tests.fuzz.mutations import mutate
from tests.fuzz.targets import FILES, Target, attempt, targets

PROPORTIONS = {"shard": 7, "image": 4, "group": 3, "index": 2}
PROPORTIONS |= dict.fromkeys(("plan", *FILES), 1)


def main() -> int:
    options = _parse()
    targets_by_kind = targets()
    kinds = (
        [options.kind] if options.kind else [k for k, n in PROPORTIONS.items() for _ in range(n)]
    )
    for target in targets_by_kind.values():  # imports what the readers import lazily
        for content in target.seeds:
            assert attempt(target, content), "a good input was refused"
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs, and dies
    note = os.open(options.note, os.O_CREAT | os.O_WRONLY)
    _limit_memory(options.memory)
    counts: Counter[str] = Counter()
    numbers = range(options.inputs) if options.only is None else [options.only]
    for number in numbers:
        kind = kinds[number % len(kinds)]
        os.pwrite(note, b"%-12d" % number, 0)  # for whoever finds this process dead
        was_read = _try(targets_by_kind[kind], kind, number, options)
        if was_read is None:
            return 1
        counts[f"{kind} {'read' if was_read else 'refused'}"] += 1
    print(json.dumps(counts))
    return 0


def make_input(target: Target, kind: str, seed: int, number: int) -> bytes:
    rng = random.Random(f"{seed}/{kind}/{number}")
    return mutate(rng.choice(target.seeds), rng, kind=kind)


def _try(target: Target, kind: str, number: int, options: argparse.Namespace) -> bool | None:
    """Whether the input was read; None after an unexpected error, which goes to stderr."""
    content = make_input(target, kind, options.seed, number)
    signal.setitimer(signal.ITIMER_REAL, 30 + 10 * options.longest)
    start = time.process_time()
    try:
        was_read = attempt(target, content)
        took = time.process_time() - start
        if took > options.longest:
            raise TimeoutError(f"{took:.1f} s of processor time")
    except BaseException:
        traceback.print_exc()
        arguments = f"--seed {options.seed} --kind {kind} --only {number}"
        print(f"{arguments}, {len(content)} bytes", file=sys.stderr)
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return was_read


def _limit_memory(mebibytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_bytes = pages * resource.getpagesize() + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=PROPORTIONS)
    parser.add_argument("--only", type=int)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of processor time")
    parser.add_argument("--note", default=os.devnull, help="file that holds the input's number")
    parser.add_argument("--memory", type=int, default=512, help="MiB above the start")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
