"""C9: plans of a million series; what is missing, against opening and counting every tar."""

import json
import random
import tarfile
import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import webdataset as wds

from benchmarks.measure import Result, Sides, interleaved, ratio
from semix.data.formats import shard_stem, spec_digest
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.store import Store
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan
from tests import handmade

CLASSES, PAIRS = 100, 4950
SERIES_A_PAIR = {10_000: 3, 100_000: 21, 1_000_000: 203}  # rounded up, by groups
LOOKUPS = 1000  # of groups and of shards at random
SHARDS, MISSING = 1000, 10
SERIES, ALPHAS, SIZE = 64, 8, 32  # of each shard


def run() -> Result:
    result = Result("C9", f"a million series planned; {MISSING} of {SHARDS} shards missing")
    planning(result)
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        scanning(result, write_root(Path(folder, "root")))
    return result


def planning(result: Result) -> None:
    """Seconds and bytes of a plan from its config to the last of its groups and shards."""
    sides: Sides = {str(n): partial(look_up, k) for n, k in SERIES_A_PAIR.items()}
    seconds = interleaved(sides, repeats=5)
    million = str(max(SERIES_A_PAIR))
    result.at_most("seconds for a plan of a million", max(seconds[million]), 2.0)
    peaks = {name: peak_bytes(side) for name, side in sides.items()}  # all are warm by now
    growth = peaks[million] / peaks[str(min(SERIES_A_PAIR))]
    result.at_most("memory of a million over ten thousand", growth, 1.1)
    result.figures["plan"] = {"cpu_seconds": seconds, "peak_bytes": peaks, "lookups": LOOKUPS}


def look_up(series_a_pair: int) -> BuildPlan:
    """A plan from its settings, its first and last group and shard, and some at random."""
    values: dict[str, Any] = {
        "real": {"name": "digits"},
        "generator": {"model": "a-model"},
        "mixing": {"groups_per_pair": series_a_pair},
        "annotation": {"model": "local-dir:a-clip"},
    }
    names = tuple(f"class {index}" for index in range(CLASSES))
    plan = BuildPlan(load_settings(BuildConfig, values), names)
    assert plan.num_groups == PAIRS * series_a_pair
    rng = random.Random(0)
    for turn in range(LOOKUPS):
        group = rng.randrange(plan.num_groups) if turn > 1 else turn * (plan.num_groups - 1)
        shard = rng.randrange(plan.num_shards) if turn > 1 else turn * (plan.num_shards - 1)
        spec = plan.shard(shard)
        assert plan.group(group).index == group and spec.start < spec.stop <= plan.num_groups
    return plan


def peak_bytes(side: Any) -> int:
    """The peak of Python's memory during the call."""
    tracemalloc.start()
    side()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def scanning(result: Result, root: Root) -> None:
    """Find missing shards by a listing, against reading the tars."""
    expected = (missing_shards(), (SHARDS - MISSING) * SERIES)
    sides = {"listing": by_listing, "tarfile": by_headers, "webdataset": by_reading}
    peers: dict[str, list[float]] = {}
    for name, side in sides.items():
        start = time.process_time()
        result.equal(f"missing shards and series by {name}", side(root) == expected, True)
        peers[name] = [time.process_time() - start]
    cold = interleaved({"ours": lambda: by_listing(root)}, repeats=9)["ours"]
    headers = interleaved({"theirs": lambda: by_headers(root)}, repeats=2)["theirs"]
    headers += peers["tarfile"]
    speedup = ratio(headers, cold)
    result.at_least("scan, ratio to the headers of every tar", speedup["ratio"], 50.0)
    result.figures["scan"] = {
        "listing": speedup,
        "over reading with webdataset": ratio(peers["webdataset"], cold),
        "cpu_seconds": {
            "listing": cold,
            "tarfile": headers,
            "webdataset": peers["webdataset"],  # once: it takes a minute
        },
    }


def by_listing(root: Root) -> tuple[list[int], int]:
    """Missing shards, and series in all other shards, as in a process that just started."""
    root = Root(root.url)
    missing = root.missing()
    return list(missing), root.progress().groups_done


def by_headers(root: Root) -> tuple[list[int], int]:
    """Missing shards and series, from the headers of every tar's members, not their contents."""
    series = 0
    for path in tars(root):
        with tarfile.open(path, "r:") as tar:
            series += sum(member.name.endswith(".json") for member in tar)
    return without_tar(root), series


def by_reading(root: Root) -> tuple[list[int], int]:
    """Missing shards and series, by reading every tar to its end, as webdataset does."""
    samples = wds.WebDataset([str(path) for path in tars(root)], shardshuffle=False)
    return without_tar(root), sum("json" in sample for sample in samples)


def tars(root: Root) -> list[Path]:
    return sorted(Path(root.url).glob("shards/*/*.tar"))


def without_tar(root: Root) -> list[int]:
    present = {int(path.name[:7]) for path in tars(root)}
    return [shard for shard in range(SHARDS) if shard not in present]


def missing_shards() -> list[int]:
    return sorted(random.Random(0).sample(range(SHARDS), MISSING))


def write_root(folder: Path) -> Root:
    """A root of shards, each with its record; their tars are hard links to one file, so that
    they need the disk space and page cache of one."""
    content = handmade.tar_of(*(handmade.sample(g, ALPHAS, side=SIZE) for g in range(SERIES)))
    plan = handmade.make_plan(SHARDS, SHARDS * SERIES, ALPHAS)
    store = Store(str(folder))
    store.put("plan.json", json.dumps(plan).encode())
    template = handmade.put_shard(store, 0, content, first=0, groups=SERIES, count=ALPHAS)
    for shard in sorted({*range(SHARDS)} - {*missing_shards()}):
        write_shard(folder, shard, template)
    for path in folder.glob("shards/0000/0000000*") if 0 in missing_shards() else ():
        path.unlink()
    return Root(store.url)


def write_shard(folder: Path, shard: int, template: dict[str, Any]) -> None:
    """Write a copy of the first shard's record for `shard`, and link its files."""
    stem, features = shard_stem(shard), template["features"]
    names = {template["tar"]: "", features["name"]: ""}
    for name in names:
        names[name] = name.replace(shard_stem(0), stem)
        if shard:
            (folder / stem).parent.mkdir(exist_ok=True)
            (folder / names[name]).hardlink_to(folder / name)
    record = {
        **template,
        "shard": shard,
        "spec": spec_digest(handmade.PLAN_DIGEST, shard),
        "first": shard * SERIES,
        "tar": names[template["tar"]],
        "features": {**features, "name": names[features["name"]]},
    }
    (folder / f"{stem}.json").write_text(json.dumps(record))
