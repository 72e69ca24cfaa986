"""Writes oracle.json: values of other libraries for fixed logits. Only this script needs them.

    pip install torch-uncertainty lightning torchvision netcal relplot probmetrics numba
    python tests/calib/metrics/oracle.py

The tests read the file and need none of them.
"""

import json
import math
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("oracle.json")
PEERS = ("torch-uncertainty", "torchmetrics", "netcal", "relplot", "probmetrics", "numpy")
BINS = 15
LIMITS = {"thr": 0.9, "aps": 0.95, "raps": 1.1}
ORDERS = (1.0, 1.5, 2.0, 3.0)
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


def ood_logits(seed: int, classes: int) -> np.ndarray:
    """Logits of 400 out-of-distribution images: flatter ones."""
    rng = np.random.default_rng(seed + 100)
    return (2 * rng.normal(size=(400, classes))).astype(np.float32)


def library_measures(seed: int, samples: int, classes: int, spread: float) -> dict[str, float]:
    import torch
    from netcal.metrics import ECE, MCE
    from relplot import config, smECE, smECE_sigma
    from torch_uncertainty.metrics import classification as peers
    from torchmetrics.classification import BinaryAUROC

    config.smECE_mesh_pts = 20_000  # an integral as a plain sum of so many points
    logits, targets = (torch.from_numpy(array) for array in case(seed, samples, classes, spread))
    probabilities = logits.softmax(1)
    confidence, predicted = probabilities.max(1)
    correct = (predicted == targets).float()
    ood_confidence = torch.from_numpy(ood_logits(seed, classes)).softmax(1).amax(1)
    scores = torch.cat([confidence, ood_confidence])
    labels = torch.cat([torch.ones(samples), torch.zeros(len(ood_confidence))]).long()
    values: dict[str, Any] = {
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
        "torch-uncertainty augrc": peers.AUGRC()(probabilities, targets),
        "torch-uncertainty coverage_at_5_risk": peers.CovAt5Risk()(probabilities, targets),
        "torch-uncertainty risk_at_80_coverage": peers.RiskAt80Cov()(probabilities, targets),
        "probmetrics variational_ece": variational_ece(confidence, correct),
        "torch-uncertainty fpr95": peers.FPR95(pos_label=1)(scores, labels),
        "torchmetrics auroc": BinaryAUROC()(scores, labels),
    }
    if classes > 2:  # of two classes, netcal measures the second class instead of the predicted one
        values["netcal ece"] = ECE(BINS).measure(probabilities.numpy(), targets.numpy())
        values["netcal mce"] = MCE(BINS).measure(probabilities.numpy(), targets.numpy())
    if confidence.max() < 0.99:  # both count confidences within 0.001 of 1 by half
        top = confidence.numpy(), correct.numpy()
        smooth = peers.SmoothCalibrationError("reflected", mesh_pts=config.smECE_mesh_pts)
        values["torch-uncertainty smooth_ece"] = smooth(probabilities, targets)
        values["relplot smooth_ece"] = smECE(*top)
        values["relplot smoothed at 0.05"] = smECE_sigma(*top, 0.05)
    return {name: 0.0 if math.isnan(value) else float(value) for name, value in values.items()}


def variational_ece(confidence: Any, correct: Any) -> float:
    """The error of two classes, right and wrong, halved: both columns err alike.

    probmetrics' own form for one column subtracts f of two columns from g of one.
    """
    import sklearn.base
    import torch
    from probmetrics.distributions import CategoricalDirac, CategoricalProbs
    from probmetrics.metrics import MetricsWithCalibration, ProperLpLoss
    from probmetrics.splitters import CVSplitter
    from sklearn.isotonic import IsotonicRegression

    class Isotonic(sklearn.base.BaseEstimator, sklearn.base.ClassifierMixin):
        def fit(self, probabilities: np.ndarray, targets: np.ndarray) -> "Isotonic":
            self.classes_ = np.arange(2)
            fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
            self.map_ = fitted.fit(probabilities[:, 1], targets)
            return self

        def predict_proba(self, probabilities: np.ndarray) -> np.ndarray:
            right = self.map_.predict(probabilities[:, 1])
            return np.stack([1 - right, right], axis=1)

    order = np.lexsort((correct.numpy(), confidence.numpy()))
    confidence, correct = confidence[order], correct[order]
    columns = torch.stack([1 - confidence.double(), confidence.double()], dim=1)
    loss = ProperLpLoss(1.0, binary_as_multiclass=True)
    metrics = MetricsWithCalibration(loss, Isotonic(), CVSplitter(5), random_state=0)
    values = metrics.compute_all(CategoricalDirac(correct.long(), 2), CategoricalProbs(columns))
    (error,) = (value for name, value in values.items() if name.startswith("calib-err"))
    return float(error) / 2


def calibrated(seed: int, samples: int, classes: int, spread: float) -> dict[str, float]:
    """NLL of the second half of the images under calibrators fitted on the first."""
    from probmetrics.calibrators.logistic import SMSCalibrator, SVSCalibrator
    from probmetrics.calibrators.temperature_scaling import ETSCalibrator

    logits, targets = case(seed, samples, classes, spread)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    p, half = weights / weights.sum(1, keepdims=True), samples // 2
    losses = {}
    peers = {"svs": SVSCalibrator(), "sms": SMSCalibrator(), "ets": ETSCalibrator(loss="ce")}
    for name, peer in peers.items():
        peer.fit(p[:half].astype(float), targets[:half])
        predictions = peer.predict_proba(p[half:].astype(float))
        losses[name] = float(
            -np.log(predictions[np.arange(len(predictions)), targets[half:]]).mean()
        )
    return losses


def conformal(seed: int, samples: int, classes: int, spread: float) -> dict[str, list[float]]:
    """Coverage and mean size of conformal sets within fixed limits."""
    import torch
    from torch_uncertainty import post_processing as peers

    logits, targets = (torch.from_numpy(array) for array in case(seed, samples, classes, spread))
    kinds = {
        "thr": peers.ConformalClsTHR,
        "aps": partial(peers.ConformalClsAPS, randomized=False),
        "raps": partial(peers.ConformalClsRAPS, randomized=False),
    }
    values = {}
    for name, kind in kinds.items():
        peer = kind(alpha=0.1, model=torch.nn.Identity(), enable_ts=False)
        peer.q_hat = torch.tensor(LIMITS[name], dtype=torch.float64)
        members = peer.conformal(logits.double()) > 0
        covered = members.gather(1, targets[:, None]).double().mean()
        values[name] = [covered.item(), members.sum(1).double().mean().item()]
    return values


def variational(seed: int, samples: int, classes: int, spread: float) -> dict[str, float]:
    """The variational error between two fixed predictions, at several orders."""
    import torch
    from probmetrics.distributions import CategoricalDirac, CategoricalProbs
    from probmetrics.metrics import ProperLpLoss

    logits, targets = (torch.from_numpy(array) for array in case(seed, samples, classes, spread))
    p = CategoricalProbs(logits.double().softmax(1))
    other = CategoricalProbs((logits.double() / 2).softmax(1))
    truth, values = CategoricalDirac(targets, classes), {}
    for order in ORDERS:
        loss = ProperLpLoss(order, binary_as_multiclass=True)
        losses = [loss._compute_indiv(truth, prediction, f_x=p).mean() for prediction in (p, other)]
        values[str(order)] = float(losses[0] - losses[1])
    return values


if __name__ == "__main__":
    content = {
        "versions": {name: version(name) for name in PEERS},
        "recipe": "python tests/calib/metrics/oracle.py",
        "bins": BINS,
        "cases": {name: library_measures(*numbers) for name, numbers in CASES.items()},
        "calibrated": {name: calibrated(*numbers) for name, numbers in CASES.items()},
        "conformal": {name: conformal(*numbers) for name, numbers in CASES.items()},
        "variational": {name: variational(*numbers) for name, numbers in CASES.items()},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
