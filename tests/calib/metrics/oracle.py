"""Writes oracle.json: what other libraries say of fixed logits. They are needed here alone.

    pip install torch-uncertainty lightning torchvision netcal relplot
    python tests/calib/metrics/oracle.py

The tests read the file and need none of them.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("oracle.json")
PEERS = ("torch-uncertainty", "torchmetrics", "netcal", "relplot", "numpy")
BINS = 15
CASES = {
    "two classes": (0, 1000, 2, 3.0),
    "few classes": (1, 600, 5, 3.0),
    "many classes": (2, 500, 40, 3.0),
    "unsure": (3, 800, 10, 1.0),
}


def case(seed: int, samples: int, classes: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Overconfident logits, float32 [N, K], and targets [N] drawn at twice their temperature."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=(samples, classes))).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) / 2).cumsum(1)
    targets = (rng.random((samples, 1)) * weights[:, -1:] > weights).sum(1)
    return logits, targets


def foreign(seed: int, classes: int) -> np.ndarray:
    """Logits of 400 images that show none of the classes: flatter ones."""
    rng = np.random.default_rng(seed + 100)
    return (2 * rng.normal(size=(400, classes))).astype(np.float32)


def measured(seed: int, samples: int, classes: int, spread: float) -> dict[str, float]:
    import torch
    from netcal.metrics import ECE, MCE
    from relplot import config, smECE, smECE_sigma
    from torch_uncertainty.metrics import classification as peers
    from torchmetrics.classification import BinaryAUROC

    config.smECE_mesh_pts = 20_000  # of a plain sum, for an integral
    logits, targets = (torch.from_numpy(part) for part in case(seed, samples, classes, spread))
    probabilities = logits.softmax(1)
    confidence, predicted = probabilities.max(1)
    correct = (predicted == targets).float()
    out = torch.from_numpy(foreign(seed, classes)).softmax(1).amax(1)
    scores = torch.cat([confidence, out])
    known = torch.cat([torch.ones(samples), torch.zeros(len(out))]).long()
    found: dict[str, Any] = {
        "torch-uncertainty adaptive_ece": peers.AdaptiveCalibrationError(
            "multiclass", num_classes=classes, num_bins=BINS
        )(probabilities, targets),
        "torch-uncertainty ece": peers.CalibrationError(
            "multiclass", num_classes=classes, num_bins=BINS
        )(probabilities, targets),
        "torch-uncertainty classwise_ece": peers.ClasswiseCalibrationError(
            num_classes=classes, num_bins=BINS
        )(probabilities, targets),
        "torch-uncertainty brier": peers.BrierScore(num_classes=classes)(probabilities, targets),
        "torch-uncertainty nll": peers.CategoricalNLL()(probabilities, targets),
        "torch-uncertainty trapezoid_aurc": peers.AURC()(probabilities, targets),
        "torch-uncertainty fpr95": peers.FPR95(pos_label=1)(scores, known),
        "torchmetrics auroc": BinaryAUROC()(scores, known),
    }
    if classes > 2:  # of two, netcal measures the second class instead of the predicted one
        found["netcal ece"] = ECE(BINS).measure(probabilities.numpy(), targets.numpy())
        found["netcal mce"] = MCE(BINS).measure(probabilities.numpy(), targets.numpy())
    if confidence.max() < 0.99:  # both count confidences within 0.001 of 1 by half
        top = confidence.numpy(), correct.numpy()
        smooth = peers.SmoothCalibrationError("reflected", mesh_pts=config.smECE_mesh_pts)
        found["torch-uncertainty smooth_ece"] = smooth(probabilities, targets)
        found["relplot smooth_ece"] = smECE(*top)
        found["relplot smoothed at 0.05"] = smECE_sigma(*top, 0.05)
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    content = {
        "versions": {name: version(name) for name in PEERS},
        "recipe": "python tests/calib/metrics/oracle.py",
        "bins": BINS,
        "cases": {name: measured(*numbers) for name, numbers in CASES.items()},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
