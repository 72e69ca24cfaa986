"""C8: our calibration measures against torchmetrics and the loops of the official definition."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.measure import Result, interleaved, ratio
from semix.calib.metrics import reliability_bins
from semix.calib.metrics.measures import calibration_metrics, classwise_error, expected_error
from semix.calib.metrics.one_pass import read_predictions, validated_inputs

SAMPLES, CLASSES = (10_000, 100_000), (10, 100, 1000)
BINS = 15
MAX_LOOPED = 10_000_000  # logits; with more, the loop over classes takes minutes
BAR = 5.0


def run() -> Result:
    result = Result(
        "C8", f"ECE and classwise ECE of {BINS} bins, process CPU seconds of one thread"
    )
    torch.set_num_threads(1)
    differences, rows = {"top-label": 0.0, "classwise": 0.0}, {}
    for samples in SAMPLES:
        for classes in CLASSES:
            logits, targets = case(samples, classes)
            name = f"{samples} x {classes}"
            rows[name] = compare(logits, targets, differences)
    for measure, difference in differences.items():
        result.at_most(f"difference of {measure} ECE", difference, 1e-6)
    for peer in ("torchmetrics", "official top-label", "official classwise"):
        ratios = {name: row[peer]["ratio"] for name, row in rows.items() if peer in row}
        result.at_least(f"least ratio to {peer}", min(ratios.values()), BAR)
    result.figures["cases"] = rows
    return result


def case(samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Logits in float32 as a network gives them, right in about three of four cases."""
    rng = torch.Generator().manual_seed(samples + classes)
    logits = 2 * torch.randn(samples, classes, generator=rng)
    targets = torch.randint(classes, (samples,), generator=rng)
    is_correct = torch.rand(samples, generator=rng) < 0.75
    # Not so much that a confidence is 1, for which torchmetrics has a separate bin.
    logits[torch.arange(samples)[is_correct], targets[is_correct]] += 5
    return logits, targets


def compare(logits: Tensor, targets: Tensor, differences: dict[str, float]) -> dict[str, Any]:
    """Ratios to each peer; `differences` keeps the largest difference of values of all calls."""
    sides: dict[str, Any] = {
        "top-label": lambda: top_label_ece(logits, targets),
        "classwise": lambda: classwise_ece(logits, targets),
        "all measures": lambda: calibration_metrics(logits, targets, BINS),
        "torchmetrics": lambda: torchmetrics_ece(logits, targets),
        "official top-label": lambda: official_ece(logits, targets),
    }
    peers = {"torchmetrics": "top-label", "official top-label": "top-label"}
    if logits.numel() <= MAX_LOOPED:
        sides["official classwise"] = lambda: official_classwise_ece(logits, targets)
        peers["official classwise"] = "classwise"
    for peer, measure in peers.items():
        difference = abs(sides[peer]() - sides[measure]())
        differences[measure] = max(differences[measure], difference)
    seconds = interleaved(sides, repeats=5 if logits.numel() <= 10**6 else 3)
    return {peer: ratio(seconds[peer], seconds[measure]) for peer, measure in peers.items()} | {
        "cpu_seconds": seconds
    }


def top_label_ece(logits: Tensor, targets: Tensor) -> float:
    return expected_error(reliability_bins(logits, targets, BINS))


def classwise_ece(logits: Tensor, targets: Tensor) -> float:
    return classwise_error(read_predictions(*validated_inputs(logits, targets), BINS).classes)


def torchmetrics_ece(logits: Tensor, targets: Tensor) -> float:
    error = multiclass_calibration_error(
        logits, targets, num_classes=logits.shape[1], n_bins=BINS, norm="l1"
    )
    return error.item()


def official_ece(logits: Tensor, targets: Tensor) -> float:
    """Guo et al. 2017 as in their code: a mask and two means for each bin."""
    confidence, predicted = logits.softmax(1).max(1)
    return binned_error(confidence, predicted.eq(targets))


def official_classwise_ece(logits: Tensor, targets: Tensor) -> float:
    """The mean over classes of the same error for each class."""
    probabilities = logits.softmax(1)
    errors = [binned_error(probabilities[:, k], targets.eq(k)) for k in range(logits.shape[1])]
    return sum(errors) / len(errors)


def binned_error(probability: Tensor, outcome: Tensor) -> float:
    edges = torch.linspace(0, 1, BINS + 1)
    error = torch.zeros(1)
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = probability.gt(low) * probability.le(high)
        fraction = inside.float().mean()
        if fraction.item() > 0:
            gap = probability[inside].mean() - outcome[inside].float().mean()
            error += gap.abs() * fraction
    return error.item()
