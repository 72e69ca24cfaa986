"""What a build will cost on the machine that it is checked on, in numbers and in words."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.flows.progress import by_stage, duration

if TYPE_CHECKING:  # the command line starts without these
    from semix.data.store import Store
    from semix.pipeline.plan import BuildPlan

# Of its matrix-product rate, what a GPU reaches with Stable Diffusion at 512 pixels in large
# batches; memory traffic between the products alone bounds it to about two thirds.
SHARE = 0.45
# A place with less than this share of the estimate is too small whatever the images look like:
# they differ by 10 to 30 % from those it was measured on, and the rest is exact.
SURE = 0.5
LARGEST_IMAGE = 3 * 2048**2  # bytes, of 2048 pixels a side without compression
NOT_KNOWN = "not known"
LONG_HOURS = 1.0
# Of memory traffic between a network's operations, reckoned for an H100.
SLOWER = (
    "none, which loses 15 to 35 % of a GPU's speed, as reckoned for an H100; generator.compile: "
    "regional compiles the transformer blocks, full all of the network and the decoder"
)


def costs(
    plan: "BuildPlan",
    store: "Store",
    *,
    missing: int,
    share: float = SHARE,
    rate: float | None = None,
    device: str = "auto",
    time: bool = False,
) -> dict[str, Any]:
    """Facts for `semix build --check`; those of cost are of the whole build.

    Args:
        missing: shards that are still to be made; what is there needs no more space.
        share: of the device's rate that is expected.
        rate: TFLOP/s of the device; None measures it.
        time: load the models and time a batch.
    Raises:
        InputError: no such device, too little space, a model that cannot be used.
    """
    from semix.data.device import resolve_device
    from semix.pipeline.estimate import estimate, hours
    from semix.pipeline.generators.loading import check_networks
    from semix.pipeline.timing import device_rate

    device, dtype = resolve_device(device), plan.config.generator.dtype
    check_networks(plan.config.generator)
    found = estimate(plan)
    free = free_bytes(store)
    if found.bytes is not None and free is not None:
        refuse_small_place(store, found.bytes * missing / plan.num_shards, free)
    reached = device_rate(device, dtype) if rate is None else rate
    needed = None if found.tflop is None else hours(found.tflop, rate=reached, share=share)
    return {
        **asdict(found),
        "missing": missing,
        "free_bytes": free,
        "device": device,
        "dtype": dtype,
        "device_tflops": reached,
        "device_tflops_measured": rate is None,
        "share": share,
        "hours": needed,
        "compile_loses": loses_by_no_compiling(plan, device, needed),
        "memory": None if found.tflop is None else memory(plan, device),
        "timed": timed(plan, device, noise_ratio=found.noise_ratio, rate=reached) if time else None,
    }


def loses_by_no_compiling(plan: "BuildPlan", device: str, hours: float | None) -> bool:
    """Whether a build on a GPU takes so long that compiling its networks would pay."""
    plain = plan.config.generator.compile == "none" and device.startswith("cuda")
    return plain and hours is not None and hours > LONG_HOURS


def memory(plan: "BuildPlan", device: str) -> dict[str, Any]:
    """Bytes that a worker needs on its GPU, and how many this one has; None without a GPU.

    Raises:
        InputError: the weights alone are more than the GPU has.
    """
    import torch
    from semix.pipeline.memory import memory_needed

    needed = memory_needed(plan.config)
    has = torch.cuda.mem_get_info(device)[1] if device.startswith("cuda") else None
    if has is not None and needed.weights > has:
        remedy = f"its weights take {amount(needed.weights)} and {device} has {amount(has)}; take "
        remedy += "a larger GPU, or generator.offload: model, or generator.dtype: bfloat16"
        raise InputError("generator.model", plan.config.generator.model, remedy)
    stages = {"encoding": needed.encoding, "making": needed.making, "weights": needed.weights}
    return {**asdict(needed), **stages, "device_bytes": has}


def check_rates(share: float, rate: float | None) -> None:
    """Raises InputError for a share outside (0, 1], or a rate that is not positive."""
    if not 0 < share <= 1:
        raise InputError("share", share, "give a share of the device's rate, above 0 and at most 1")
    if rate is not None and not rate > 0:
        raise InputError("rate", rate, "give the device's TFLOP/s, above 0")


def check_space(plan: "BuildPlan", store: "Store", *, missing: int) -> None:
    """What `costs` says of space, of so many missing shards, for a build that begins now.

    Models are counted only where images of any model might not fit.

    Raises:
        InputError: too little space, a model that cannot be used.
    """
    free, share = free_bytes(store), missing / plan.num_shards
    if free is None or free > plan.num_images * share * LARGEST_IMAGE:
        return
    from semix.pipeline.estimate import estimate

    needed = estimate(plan).bytes
    if needed is not None:
        refuse_small_place(store, needed * share, free)


def free_bytes(store: "Store") -> int | None:
    """Space left where a local store is or will be; None for others."""
    if not store.local:
        return None
    path = Path(store.url)
    there = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(there).free


def refuse_small_place(store: "Store", needed: float, free: int) -> None:
    """Raises InputError where not even much smaller images would fit."""
    if free < SURE * needed:
        remedy = f"has {amount(free)} free, and what is missing takes about {amount(needed)}"
        raise InputError("out", store.url, f"{remedy}; choose another place or a smaller plan")


def timed(plan: "BuildPlan", device: str, *, noise_ratio: float, rate: float) -> dict[str, Any]:
    """One warm batch: its speed, and hours of the whole build at that speed on one device."""
    from semix.pipeline.timing import time_batch

    batch = time_batch(plan, device=device, noise_ratio=noise_ratio)
    achieved = None if batch.tflop is None else batch.tflop / batch.seconds
    return {
        "images": batch.images,
        "seconds": batch.seconds,
        "stages": batch.stages,
        "images_per_second": batch.images / batch.seconds,
        "tflops": achieved,
        "share": None if achieved is None else achieved / rate,
        "hours": batch.build_seconds / 3600,
    }


def readable(facts: dict[str, Any]) -> dict[str, str]:
    """The facts of `semix build --check` in words, a line each."""
    shown = {"out": facts["out"]}
    shown |= {key: f"{facts[key]:,}" for key in ("classes", "groups", "images", "shards")}
    shown["missing"] = f"{facts['missing']:,} shards"
    shown["bytes"] = _space(facts)
    rows = facts["network_rows"]
    shown["network calls"] = NOT_KNOWN if rows is None else f"{rows:,} rows"
    shown["noise selection"] = _noise(facts)
    shown["TFLOP"] = NOT_KNOWN if facts["tflop"] is None else f"{facts['tflop']:,.4g}"
    shown["hours"] = _hours(facts)
    if facts["compile_loses"]:
        shown["compile"] = SLOWER
    shown["GPU memory"] = _memory(facts["memory"])
    if facts["timed"] is not None:
        shown |= _timed(facts["timed"])
    if facts["unknown"] is not None:
        shown["not known"] = facts["unknown"]
    return shown


def amount(count: float) -> str:
    """`1.3 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _space(facts: dict[str, Any]) -> str:
    needed = NOT_KNOWN if facts["bytes"] is None else amount(facts["bytes"])
    return (
        needed if facts["free_bytes"] is None else f"{needed}, {amount(facts['free_bytes'])} free"
    )


def _noise(facts: dict[str, Any]) -> str:
    if not facts["noise_rows"]:
        return "adds nothing"
    times = f"{facts['noise_ratio']:.3g} times the cost of generating"
    return f"adds {times} ({facts['noise_rows']:,} rows)"


def _hours(facts: dict[str, Any]) -> str:
    source = "measured" if facts["device_tflops_measured"] else "as given"
    rate = f"{facts['device_tflops']:.3g} TFLOP/s ({facts['device']}, {facts['dtype']}, {source})"
    found = NOT_KNOWN if facts["hours"] is None else _on_one_device(facts["hours"])
    return f"{found}, at {facts['share']:.0%} of {rate}"


def _memory(found: dict[str, Any] | None) -> str:
    if found is None:
        return NOT_KNOWN
    weights = f"{amount(found['network'])} network, {amount(found['texts'])} text encoders"
    batch = max(found["sampling"], found["decoding"])
    said = f"{amount(found['making'])} ({weights}, {amount(batch)} a batch)"
    if found["apart"]:
        said += f"; before, to encode prompts once on a machine, {amount(found['encoding'])}"
    if found["device_bytes"] is None:
        return said
    worst = max(found["making"], found["encoding"])
    fits = "it has" if worst <= found["device_bytes"] else "more than it has:"
    return f"{said}; {fits} {amount(found['device_bytes'])}"


def _timed(timed: dict[str, Any]) -> dict[str, str]:
    speed = f"{timed['images']} images in {timed['seconds']:.3g} s ({by_stage(timed['stages'])})"
    speed += f", {timed['images_per_second']:.3g} images/s"
    if timed["tflops"] is not None:
        speed += f", {timed['tflops']:.3g} TFLOP/s, {timed['share']:.0%} of the device's rate"
    return {
        "one warm batch": speed,
        "hours at its speed": _on_one_device(timed["hours"]),
    }


def _on_one_device(hours: float) -> str:
    short = f" ({duration(3600 * hours)})" if hours < 1.5 else ""
    return f"{hours:,.3g}{short} on one device"
