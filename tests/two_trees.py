"""Compare the outputs of two checkouts: `python -m tests.two_trees OTHER --models STANDINS`.

Runs the same commands from both checkouts, one after the other, and compares their outputs: every
image and KEY.json, features, prototypes, label sets, exports, audit figures, trained weights,
logits and histories, and the field that is named when bad input is refused. Values that depend on
clock, machine or version are left out, and so are references between files: names that are hashes,
indices, plan.json. Use it when code is moved and its output must not change by a byte.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parents[1]
# Fields that depend on clock, machine or version, and identities that follow from them.
VOLATILE = {
    *("seconds", "wall_seconds", "time", "worker", "versions", "attempt", "generation", "host"),
    *("began", "digest", "url", "run", "root", "images_per_second", "stages", "tflop", "peak"),
    *("tflop_per_second", "worker_seconds_left", "report", "semix", "plan", "spec", "source"),
    *("schema", "series", "labels_digest", "machine", "device_name", "images", "bank", "data"),
    *("page", "json", "flags_file", "training_seconds"),
}
SKIPPED = re.compile(
    r"(^|/)(plan\.json|index/|noise/|leases/|failed/|cache|build\.yaml|train\.yaml|audit/)"
    r"|\.(html|log|png|lock|key|yaml|md|css)$|events\.out|settings\.json|\.partial$"
)
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
    "pndm": (PAIRS, "generator.scheduler=pndm", "mixing.grid=interior"),
    "selected": (PAIRS, "noise={strategy: select, candidates: 4, halving: true, max_cost: 100}"),
    "optimised": (PAIRS, "noise={strategy: optimise, candidates: 2, iterations: 2, max_cost: 100}"),
    "similar": ("mixing.pairs={kind: similar, count: 4}", "annotation.scale=4"),
    "simplex": (
        "mixing={classes: 3, alphas: 5, grid: random, groups_per_pair: 1, "
        "pairs: {kind: sampled, count: 6}}",
        "annotation.rule=simplex",
    ),
    "ratio": (PAIRS, "annotation.rule=mixing_ratio"),
    "shares": (PAIRS, "annotation.rule=similarity", "annotation.temperature=0.1"),
    "second": (PAIRS, "annotation.second={model: 'local-dir:clip-2'}"),
}
TRAINING = {
    "name": "two trees",
    "real": {"name": "digits", "train_per_class": 20, "validation_per_class": 10},
    "model": {"name": "lenet"},
    "epochs": 2,
    "batch_size": 20,
    "evaluation": {"bootstrap": 20},
}
CSM = "mixed={url: builds/plain, class_matched: false}"
TRAININGS: dict[str, tuple[str, ...]] = {
    "ce": (),
    "csm": (CSM, "head={method: mac_cal, epochs: 1, batch_size: 20}"),
    "fedlas": (CSM, "loss.name=fedlas_ls", "seeds=[0, 1]"),
}
# Refused before anything is made; what must agree is the exit status and the field that is named.
BUILD = ("build", "build.yaml", "--out", "x", "--set")
REFUSALS: dict[str, tuple[str, ...]] = {
    "unknown setting": (*BUILD, "mixing.alfas=4"),
    "alpha": (*BUILD, "mixing.alphas=[0, 2]"),
    "model": (*BUILD, "generator.model=./nowhere"),
    "clip": (*BUILD, "annotation.model=local-dir:nowhere"),
    "pair": (*BUILD, "mixing.pairs={kind: named, names: [[a, b]]}"),
    "cost": (*BUILD, "noise={strategy: optimise, max_cost: 0.1}"),
    "place": ("build", "build.yaml", "--out", "builds"),
    "other plan": ("build", "build.yaml", "--out", "builds/plain", "--set", "mixing.seed=1"),
    "url": ("build", "build.yaml", "--out", "ftp://x/y"),
    "no root": ("status", "nowhere"),
    "group": ("show", "builds/plain", "9999"),
    "labels": ("export", "builds/plain", "--to", "y", "--labels", "abcdef"),
    "relabel": ("relabel", "builds/plain", "--set", "mixing.seed=1"),
    "exclude": (
        *("train", "train.yaml", "--out", "z", "--set", CSM),
        *("--set", "mixed.exclude.min_stability=0"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.two_trees", description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout, or a file that --keep wrote")
    parser.add_argument("--models", type=Path, required=True, help="holds diffusion/ and clip/")
    parser.add_argument("--keep", type=Path, help="write this tree's outputs to a file, and end")
    options = parser.parse_args()
    trees = [HERE] if options.keep else [options.other, HERE]
    outputs = [_outputs_of(tree.resolve(), options.models.resolve()) for tree in trees]
    if options.keep:
        options.keep.write_text(json.dumps(outputs[0], indent=1))
        return 0
    differing = sorted(
        name
        for name in outputs[0].keys() | outputs[1].keys()
        if outputs[0].get(name) != outputs[1].get(name)
    )
    for name in differing:
        where = ["other"] * (name in outputs[0]) + ["here"] * (name in outputs[1])
        print(f"{name}: {'differs' if len(where) == 2 else 'only ' + where[0]}")
    print(f"{len(outputs[0])} and {len(outputs[1])} outputs, {len(differing)} differ")
    return bool(differing)


def _outputs_of(tree: Path, models: Path) -> dict[str, str]:
    if tree.is_file():
        return dict(json.loads(tree.read_text()))
    with tempfile.TemporaryDirectory(prefix="semix-trees-") as folder:
        outputs = Path(folder)
        run_all(tree, outputs, models)
        return dict(contents(outputs)) | refusals(tree, outputs)


def run_all(tree: Path, folder: Path, models: Path) -> None:
    """Run all commands in `folder`, from the code of `tree`."""
    shutil.copytree(models / "clip", folder / "clip-2")
    settings = {
        "generator": {"model": str(models / "diffusion"), "steps": 6, "guidance_scale": 2.0},
        "annotation": {"model": f"local-dir:{models / 'clip'}"},
    }
    (folder / "build.yaml").write_text(yaml.safe_dump(BASE | settings))
    (folder / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    for name, changes in BUILDS.items():
        semix(tree, folder, "build", "build.yaml", "--out", f"builds/{name}", *_options(changes))
    plain = "builds/plain"
    semix(tree, folder, "extend", plain, "--groups-per-pair", "4")
    semix(tree, folder, "relabel", plain, "--set", "annotation.scale=3")
    semix(tree, folder, "relabel", plain, "--set", "annotation.model=local-dir:clip-2")
    semix(tree, folder, "relabel", plain, "--set", "annotation.rule=similarity", "--out", "baked")
    semix(tree, folder, "export", plain, "--to", "exported")
    semix(tree, folder, "export", plain, "--to", "exported-parquet", "--format", "parquet")
    for name in ("plain", "simplex", "second", "selected"):
        audit = semix(tree, folder, "audit", f"builds/{name}", "--json")
        (folder / f"audit-{name}.json").write_text(audit)
    for name, changes in TRAININGS.items():
        semix(tree, folder, "train", "train.yaml", "--out", f"runs/{name}", *_options(changes))


def refusals(tree: Path, folder: Path) -> dict[str, str]:
    """Exit status and field of each refusal."""
    outputs = {}
    for name, arguments in REFUSALS.items():
        process = _run(tree, folder, arguments)
        error = re.search(r"error: (.*?) = ", " ".join(process.stderr.split()))
        field = error[1].replace(str(folder), "PLACE") if error else process.stderr[-300:]
        outputs[f"refusal: {name}"] = f"{process.returncode} {field}"
    return outputs


def semix(tree: Path, folder: Path, *arguments: str) -> str:
    """Run a command and return what it prints; ends the comparison if it fails."""
    process = _run(tree, folder, arguments)
    if process.returncode:
        sys.exit(f"{tree}: semix {' '.join(arguments)}\n{process.stdout[-2000:]}{process.stderr}")
    print(f"{tree.name}: semix {' '.join(arguments)[:70]}", flush=True)
    return process.stdout


def _run(
    tree: Path, folder: Path, arguments: tuple[str, ...]
) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "1000",
        "SEMIX_CACHE": str(folder / "cache"),
    }
    command = [tree / ".venv" / "bin" / "semix", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields a name without hashes and the digest of the content, of each file."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or SKIPPED.search(name):
            continue
        if digest := re.search(r"labels/([0-9a-f]{64})", name):
            name = name.replace(digest[1], _set_name(digest[1], path))
        name = re.sub(r"-[0-9a-f]{8}(\.tar|\.features)", r"\1", name)
        if path.suffix == ".tar":
            yield from _members(name, path)
        elif path.suffix == ".safetensors":
            tensors = load_file(path)
            for key, tensor in sorted(tensors.items()):
                yield f"{name}: {key}", _hash(str(tensor.dtype).encode() + tensor.tobytes())
        elif path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            yield (
                name,
                _hash(json.dumps([_stable_fields(json.loads(x)) for x in lines]).encode()),
            )
        else:
            yield name, _hash(path.read_bytes())


def _members(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """Images and records of a shard, each compared alone; the bytes of the tar do not count."""
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            content = file.read() if file else b""
            if member.name.endswith(".json"):
                record = json.loads(content)
                record["noise"].pop("bank", None)
                content = json.dumps(record, sort_keys=True).encode()
            yield f"{name}: {member.name}", _hash(content)


def _set_name(digest: str, path: Path) -> str:
    """A name of a label set from its settings, since its digest depends on the plan."""
    settings = json.loads((_folder_of(path, digest) / "set.json").read_text())
    return _hash(json.dumps(settings["annotation"], sort_keys=True).encode())[:8]


def _folder_of(path: Path, digest: str) -> Path:
    return next(parent for parent in path.parents if parent.name == digest)


def _stable_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable_fields(v) for k, v in sorted(value.items()) if k not in VOLATILE}
    return [_stable_fields(v) for v in value] if isinstance(value, list) else value


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _options(changes: tuple[str, ...]) -> list[str]:
    return [argument for change in changes for argument in ("--set", change)]


if __name__ == "__main__":
    sys.exit(main())
