"""Do two trees make the same? `python -m benchmarks.two_trees OTHER --models STANDINS`.

Runs the same commands from both checkouts, one tree after the other, and compares every file that
they leave: images, labels, features, exports, audits, trained weights and figures, byte for byte;
JSON without what a clock or a machine says. For whoever moves code that must not change its bytes.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parents[1]
# What a clock, a machine or a version says; anything else must agree.
VOLATILE = {
    *("seconds", "wall_seconds", "time", "worker", "versions", "attempt", "generation", "host"),
    *("began", "digest", "url", "run", "root", "images_per_second", "stages", "tflop", "peak"),
    *("tflop_per_second", "worker_seconds_left", "report", "semix", "plan", "spec", "source"),
}
LEFT_OUT = {".html", ".log", ".png", ".lock", ".key", ".yaml", ".events"}  # shown, not made
PAIRS = "mixing.pairs={kind: named, names: [['zero', 'one'], ['three', 'eight'], ['four', 'nine']]}"
BASE = {
    "real": {"name": "digits"},
    "mixing": {"alphas": 4, "groups_per_pair": 3},
    "shards": {"groups_per_shard": 4, "groups_per_batch": 2},
}
BUILDS: dict[str, tuple[str, ...]] = {
    "plain": (PAIRS,),
    "png": (PAIRS, "shards.image_format=png", "shards.store_size=16"),
    "jpg": (PAIRS, "shards.image_format=jpg", "generator.scheduler=dpmpp_2m"),
    "spherical": (PAIRS, "mixing.interpolation=spherical", "annotation.normalize=true"),
    "selected": (PAIRS, "noise={strategy: select, candidates: 3, max_cost: 100}"),
    "optimised": (PAIRS, "noise={strategy: optimise, candidates: 2, iterations: 2, max_cost: 100}"),
    "similar": ("mixing.pairs={kind: similar, count: 4}", "annotation.scale=4"),
    "simplex": (
        "mixing={classes: 3, groups_per_pair: 1, pairs: {kind: sampled, count: 6}}",
        "annotation.rule=simplex",
    ),
    "ratio": (PAIRS, "annotation.rule=mixing_ratio"),
    "shares": (PAIRS, "annotation={rule: similarity, temperature: 0.1}"),
}
TRAINING = {
    "name": "two trees",
    "real": {"name": "digits", "train_per_class": 20, "validation_per_class": 10},
    "model": {"name": "lenet"},
    "epochs": 2,
    "batch_size": 20,
    "evaluation": {"bootstrap": 20},
}
TRAININGS: dict[str, tuple[str, ...]] = {
    "ce": (),
    "csm": ("mixed.url=builds/plain", "head={method: mac_cal, epochs: 1, batch_size: 20}"),
    "fedlas": ("mixed.url=builds/plain", "loss.name=fedlas_ls", "seeds=[0, 1]"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_trees", description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--models", type=Path, required=True, help="holds diffusion/ and clip/")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="semix-trees-") as folder:
        found = []
        for name, tree in (("other", options.other.resolve()), ("here", HERE)):
            place = Path(folder) / name
            place.mkdir()
            run_all(tree, place, options.models.resolve(), only=options.only)
            found.append(dict(contents(place)))
    differing = sorted(name for name in found[0].keys() | found[1].keys() if _differs(name, *found))
    for name in differing:
        where = [
            side for side, files in zip(("other", "here"), found, strict=True) if name in files
        ]
        print(f"{name}: {'differs' if len(where) == 2 else 'only ' + where[0]}")
    print(f"{len(found[0])} and {len(found[1])} files, {len(differing)} differ")
    return bool(differing)


def run_all(tree: Path, place: Path, models: Path, *, only: str) -> None:
    """All commands, in `place`, from the code of `tree`."""
    given = {
        "generator": {"model": str(models / "diffusion"), "steps": 6, "guidance_scale": 2.0},
        "annotation": {"model": f"local-dir:{models / 'clip'}"},
    }
    (place / "build.yaml").write_text(yaml.safe_dump(BASE | given))
    (place / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    for name, changes in BUILDS.items():
        if only in name or name == "plain":
            semix(tree, place, "build", "build.yaml", "--out", f"builds/{name}", *_set(changes))
    plain = "builds/plain"
    semix(tree, place, "extend", plain, "--groups-per-pair", "4")
    semix(tree, place, "relabel", plain, "--set", "annotation.scale=3")
    semix(tree, place, "relabel", plain, "--set", "annotation.rule=similarity", "--out", "baked")
    semix(tree, place, "export", plain, "--to", "exported")
    semix(tree, place, "export", plain, "--to", "exported.parquet", "--format", "parquet")
    (place / "audit.json").write_text(semix(tree, place, "audit", plain, "--json"))
    for name, changes in TRAININGS.items():
        if only in name:
            semix(tree, place, "train", "train.yaml", "--out", f"runs/{name}", *_set(changes))


def semix(tree: Path, place: Path, *arguments: str) -> str:
    """What a command prints; raises if it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "SEMIX_CACHE": str(place.parent / f"cache-{place.name}"),
    }
    command = [sys.executable, "-P", "-m", "flows.cli", *arguments]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{tree}: semix {' '.join(arguments)}\n{ended.stderr}")
    print(f"{place.name}: semix {' '.join(arguments)[:60]}", flush=True)
    return ended.stdout


def contents(place: Path) -> Iterator[tuple[str, str]]:
    """What each file says, by its path; names of shards and label sets hold hashes already."""
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.suffix not in LEFT_OUT and "events.out" not in path.name:
            content = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):
                lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content]
                content = json.dumps([_lasting(json.loads(line)) for line in lines]).encode()
            yield str(path.relative_to(place)), hashlib.sha256(content).hexdigest()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in sorted(value.items()) if k not in VOLATILE}
    return [_lasting(v) for v in value] if isinstance(value, list) else value


def _differs(name: str, other: dict[str, str], here: dict[str, str]) -> bool:
    return other.get(name) != here.get(name)


def _set(changes: tuple[str, ...]) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


if __name__ == "__main__":
    sys.exit(main())
