"""Estimate the cost of a build on this machine, in numbers and in words."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.pace import duration
from semix.flows.progress import by_stage

if TYPE_CHECKING:  # the command line starts without these
    from semix.data.store import Store
    from semix.pipeline.plan import BuildPlan

# Fraction of its matrix-product rate that a GPU reaches with Stable Diffusion at 512 pixels, in
# large batches; memory traffic between the products alone limits it to about two thirds.
DEFAULT_SHARE = 0.45
# A build is refused if free space is less than this fraction of the estimate: sizes of images
# differ by 10 to 30 % from the measured ones, and the other terms of the estimate are exact.
MIN_FREE_RATIO = 0.5
LARGEST_IMAGE = 3 * 2048**2  # bytes of 2048 x 2048 pixels without compression
NOT_KNOWN = "not known"
LONG_HOURS = 1.0
# The loss comes from memory traffic between a network's operations.
SLOWER = (
    "none, which loses 15 to 35 % of a GPU's speed, as estimated for an H100; generator.compile: "
    "regional compiles the transformer blocks, full the whole network and the decoder"
)


def costs(
    plan: "BuildPlan",
    store: "Store",
    *,
    missing: int,
    share: float = DEFAULT_SHARE,
    rate: float | None = None,
    device: str = "auto",
    time: bool = False,
) -> dict[str, Any]:
    """The facts of `semix build --check`; costs are those of the whole build.

    Args:
        missing: number of missing shards; only they need space.
        share: expected fraction of the device's rate.
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
    needs = estimate(plan)
    free = free_bytes(store)
    if needs.bytes is not None and free is not None:
        check_disk_space(store, needs.bytes * missing / plan.num_shards, free)
    tflops = device_rate(device, dtype) if rate is None else rate
    device_hours = None if needs.tflop is None else hours(needs.tflop, rate=tflops, share=share)
    return {
        **asdict(needs),
        "missing": missing,
        "free_bytes": free,
        "device": device,
        "dtype": dtype,
        "device_tflops": tflops,
        "device_tflops_measured": rate is None,
        "share": share,
        "hours": device_hours,
        "compile_loses": would_gain_by_compiling(plan, device, device_hours),
        "memory": None if needs.tflop is None else memory(plan, device),
        "timed": timed(plan, device, noise_ratio=needs.noise_ratio, rate=tflops) if time else None,
    }


def would_gain_by_compiling(plan: "BuildPlan", device: str, hours: float | None) -> bool:
    """Whether a build on a GPU takes so long that compiling its networks would pay."""
    runs_uncompiled = plan.config.generator.compile == "none" and device.startswith("cuda")
    return runs_uncompiled and hours is not None and hours > LONG_HOURS


def memory(plan: "BuildPlan", device: str) -> dict[str, Any]:
    """Bytes that a worker needs on its GPU, and the GPU's bytes (None without a GPU).

    Raises:
        InputError: the weights alone do not fit into the GPU.
    """
    import torch

    from semix.pipeline.memory import memory_needed

    needed = memory_needed(plan.config)
    total = torch.cuda.mem_get_info(device)[1] if device.startswith("cuda") else None
    if total is not None and needed.weights > total:
        remedy = (
            f"its weights take {amount(needed.weights)} and {device} has {amount(total)}; take "
        )
        remedy += "a larger GPU, or generator.offload: model, or generator.dtype: bfloat16"
        raise InputError("generator.model", plan.config.generator.model, remedy)
    stages = {"encoding": needed.encoding, "making": needed.making, "weights": needed.weights}
    return {**asdict(needed), **stages, "device_bytes": total}


def check_rates(share: float, rate: float | None) -> None:
    """Raise InputError for a share outside (0, 1], or a rate that is not positive."""
    if not 0 < share <= 1:
        raise InputError("share", share, "give a share of the device's rate, above 0 and at most 1")
    if rate is not None and not rate > 0:
        raise InputError("rate", rate, "give the device's TFLOP/s, above 0")


def check_space(plan: "BuildPlan", store: "Store", *, missing: int) -> None:
    """Check the space for the missing shards of a build that begins now.

    The models are read only if images of the largest size would not fit.

    Raises:
        InputError: too little space, a model that cannot be used.
    """
    free, missing_fraction = free_bytes(store), missing / plan.num_shards
    if free is None or free > plan.num_images * missing_fraction * LARGEST_IMAGE:
        return
    from semix.pipeline.estimate import estimate

    needed = estimate(plan).bytes
    if needed is not None:
        check_disk_space(store, needed * missing_fraction, free)


def free_bytes(store: "Store") -> int | None:
    """Free space where a local store is or will be; None for other stores."""
    if not store.local:
        return None
    path = Path(store.url)
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def check_disk_space(store: "Store", needed: float, free: int) -> None:
    """Raise InputError if even much smaller images would not fit."""
    if free < MIN_FREE_RATIO * needed:
        remedy = f"has {amount(free)} free, and what is missing takes about {amount(needed)}"
        raise InputError("out", store.url, f"{remedy}; choose another place or a smaller plan")


def timed(plan: "BuildPlan", device: str, *, noise_ratio: float, rate: float) -> dict[str, Any]:
    """Speed of one batch after warm-up, and hours of the whole build at that speed."""
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
    """The facts of `semix build --check` as text, one line per fact."""
    lines = {"out": facts["out"]}
    lines |= {key: f"{facts[key]:,}" for key in ("classes", "groups", "images", "shards")}
    lines["missing"] = f"{facts['missing']:,} shards"
    lines["bytes"] = _space(facts)
    rows = facts["network_rows"]
    lines["network calls"] = NOT_KNOWN if rows is None else f"{rows:,} rows"
    lines["noise selection"] = _noise(facts)
    lines["TFLOP"] = NOT_KNOWN if facts["tflop"] is None else f"{facts['tflop']:,.4g}"
    lines["hours"] = _hours(facts)
    if facts["compile_loses"]:
        lines["compile"] = SLOWER
    lines["GPU memory"] = _memory(facts["memory"])
    if facts["timed"] is not None:
        lines |= _timed(facts["timed"])
    if facts["unknown"] is not None:
        lines["not known"] = facts["unknown"]
    return lines


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
    estimate = NOT_KNOWN if facts["hours"] is None else _on_one_device(facts["hours"])
    return f"{estimate}, at {facts['share']:.0%} of {rate}"


def _memory(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return NOT_KNOWN
    weights = f"{amount(facts['network'])} network, {amount(facts['texts'])} text encoders"
    batch = max(facts["sampling"], facts["decoding"])
    text = f"{amount(facts['making'])} ({weights}, {amount(batch)} per batch)"
    if facts["apart"]:
        text += f"; to encode prompts, once per machine, {amount(facts['encoding'])}"
    if facts["device_bytes"] is None:
        return text
    peak_bytes = max(facts["making"], facts["encoding"])
    fits = "it has" if peak_bytes <= facts["device_bytes"] else "more than it has:"
    return f"{text}; {fits} {amount(facts['device_bytes'])}"


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
