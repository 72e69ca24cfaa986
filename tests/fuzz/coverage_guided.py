"""Fuzz one target with atheris, which keeps inputs that reach new code.

python -m tests.fuzz.coverage_guided shard CORPUS -runs=100000 -rss_limit_mb=900
"""

import random
import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["semix.data", "PIL"]):
    from tests.fuzz.mutations import mutate
    from tests.fuzz.targets import attempt, targets


def main() -> None:
    kind, corpus = sys.argv[1], Path(sys.argv[2])
    target = targets()[kind]
    for number, content in enumerate(target.seeds):
        (corpus / f"seed{number}").write_bytes(content)
    warnings.simplefilter("ignore")

    def test(content: bytes) -> None:
        attempt(target, content)

    def change(content: bytes, max_bytes: int, seed: int) -> bytes:
        """libFuzzer's own change, or one that knows the format, half of the time each."""
        if seed % 2:
            changed: bytes = atheris.Mutate(content, max_bytes)
            return changed
        return mutate(content, random.Random(seed), kind=kind)[:max_bytes]

    atheris.Setup([sys.argv[0], *sys.argv[2:]], test, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
