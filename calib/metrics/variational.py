"""Lower bounds of calibration errors, from recalibration that is cross-fitted over folds."""

import warnings

import numpy as np
import torch
from torch import Tensor

FOLDS = 5
MIN_SAMPLES = 2 * FOLDS  # two samples per fold; fewer are too few for a useful fit


def variational_error(
    predicted: Tensor, recalibrated: Tensor, truth: Tensor, order: float = 2.0
) -> float:
    """A lower bound of the L_p calibration error E |E[y | f] - f|_p, equal where g = E[y | f].

    It is the mean of <sign(d) |d|^(p-1) / |d|_p^(p-1), y - f> with d = g - f: how much better g is
    than f in the proper loss that belongs to this error. It can be negative by chance.

    Args:
        predicted: f, [N, K] probabilities, or [N, 1] of one event.
        recalibrated: g, shaped as f; each image's recalibration is fitted without that image.
        truth: y, shaped as f: one-hot, or whether the event occurred.
        order: p, at least 1.

    Source: Berta, Holzmuller, Jordan and Bach 2026, arXiv 2602.24230.
    """
    difference = (recalibrated - predicted).double()
    norm = torch.linalg.vector_norm(difference, ord=order, dim=1, keepdim=True)
    powered = difference.abs().pow(order - 1) * difference.sign()
    direction = torch.where(norm > 0, powered / norm.clamp(min=1e-300).pow(order - 1), 0.0)
    return (direction * (truth - predicted)).sum(1).mean().item()


def top_label_error(confidence: Tensor, correct: Tensor) -> float:
    """The bound on E |P(correct | confidence) - confidence| of the top label, which ECE estimates.

    P is isotonic regression, fitted for each of five stratified folds on the other four. With fewer
    than ten samples it is 0.

    Args:
        confidence, correct: [N] float64.
    """
    if len(confidence) < MIN_SAMPLES:
        return 0.0
    confidences, truth = confidence.numpy(), correct.numpy() > 0.5
    by_confidence = np.lexsort((truth, confidences))  # folds must not depend on the images' order
    confidences, truth = confidences[by_confidence], truth[by_confidence]
    columns = (confidences, cross_fitted(confidences, truth), truth.astype(float))
    f, g, y = (torch.from_numpy(column)[:, None] for column in columns)
    return variational_error(f, g, y, order=1.0)


def cross_fitted(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """P(correct | confidence), [N]; the fit for each sample is on the folds without it."""
    from sklearn.isotonic import IsotonicRegression  # takes a second to import
    from sklearn.model_selection import StratifiedKFold

    probability = np.empty(len(confidence))
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sklearn warns if there are fewer errors than folds
        splits = list(splitter.split(confidence, correct))
    for other_folds, fold in splits:
        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        fitted.fit(confidence[other_folds], correct[other_folds].astype(float))
        probability[fold] = fitted.predict(confidence[fold])
    return probability
