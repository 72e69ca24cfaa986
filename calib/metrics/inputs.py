"""What every measure takes: logits and targets, checked, on the CPU."""

import torch
from torch import Tensor


def checked(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`as_given` in float64, for what is fitted to logits. [N, K] and int64 [N]."""
    logits, targets = as_given(logits, targets)
    return logits.double(), targets


def as_given(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same values on the CPU without gradient, at least float32 [N, K] and int64 [N].

    Raises:
        ValueError: wrong shapes or types, no samples, a logit that is not finite, or a target
            that is no class; the text names the first such value.
    """
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)}: give float [N, K] with K >= 2"
        )
    if targets.shape != logits.shape[:1]:
        wanted = f"[{logits.shape[0]}], one target a row of logits"
        raise ValueError(f"targets have shape {tuple(targets.shape)}: give {wanted}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}: give class numbers")
    if len(logits) == 0:
        raise ValueError("logits have 0 rows: give at least one sample")
    logits, targets = logits.detach().cpu(), targets.detach().cpu().long()
    if logits.dtype != torch.float64:
        logits = logits.float()
    _refuse_bad_values(logits, targets)
    return logits, targets


def check_bins(bins: int) -> None:
    """Raises ValueError unless `bins` is a positive whole number."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins = {bins}: give a whole number of at least 1")


def _refuse_bad_values(logits: Tensor, targets: Tensor) -> None:
    # One value that is not finite makes the sum so; a sum can also overflow, hence the look.
    bad = torch.empty(0) if logits.sum().isfinite() else (~logits.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        found = f"logits[{row}, {column}] = {logits[row, column].item()}"
        raise ValueError(f"{found}: every logit must be finite")
    classes = logits.shape[1]
    wrong = ((targets < 0) | (targets >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        found = f"targets[{row}] = {targets[row].item()}"
        raise ValueError(f"{found}: must lie in 0..{classes - 1}, as logits have {classes} columns")
