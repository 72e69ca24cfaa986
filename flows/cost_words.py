"""The facts of `semix build --check` in words."""

from typing import Any

from flows.progress import by_stage, duration

NOT_KNOWN = "not known"


def readable(facts: dict[str, Any]) -> dict[str, str]:
    """One line a fact."""
    shown = {"out": facts["out"]}
    shown |= {key: f"{facts[key]:,}" for key in ("classes", "groups", "images", "shards")}
    shown["missing"] = f"{facts['missing']:,} shards"
    shown["bytes"] = _space(facts)
    shown["network calls"] = _calls(facts)
    shown["noise selection"] = _noise(facts)
    shown["TFLOP"] = _tflop(facts)
    shown["hours"] = _hours(facts)
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


def _calls(facts: dict[str, Any]) -> str:
    if facts["network_rows"] is None:
        return NOT_KNOWN
    shallow = facts["shallow_rows"]
    more = f", and {shallow:,} of the outermost layers alone" if shallow else ""
    return f"{facts['network_rows']:,} rows{more}"


def _noise(facts: dict[str, Any]) -> str:
    if not facts["noise_rows"]:
        return "adds nothing"
    times = f"{facts['noise_ratio']:.3g} times the cost of generating"
    return f"adds {times} ({facts['noise_rows']:,} rows)"


def _tflop(facts: dict[str, Any]) -> str:
    if facts["tflop"] is None:
        return NOT_KNOWN
    gate = facts["gate_tflop"]
    more = f", and {gate:,.4g} for the fidelity gate before" if gate else ""
    return f"{facts['tflop']:,.4g}{more}"


def _hours(facts: dict[str, Any]) -> str:
    source = "measured" if facts["device_tflops_measured"] else "as given"
    rate = f"{facts['device_tflops']:.3g} TFLOP/s ({facts['device']}, {facts['dtype']}, {source})"
    found = NOT_KNOWN if facts["hours"] is None else _on_one_device(facts["hours"])
    return f"{found}, at {facts['share']:.0%} of {rate}"


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
