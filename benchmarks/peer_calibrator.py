"""Fit probmetrics' structured matrix scaling; runs in an environment of its own, without semix."""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from probmetrics.calibrators import SMSCalibrator


def main(folder: Path) -> None:
    """Print test NLL, seconds of the fit and peak memory, as JSON."""
    arrays = {path.stem: np.load(path) for path in folder.glob("*.npy")}
    held_out, test = (
        torch.from_numpy(arrays[f"{name}_logits"]).double().softmax(1).numpy()
        for name in ("held_out", "test")
    )
    calibrator = SMSCalibrator(penalty="ridge", opt="bfgs")  # its defaults, the method of the paper
    started = time.perf_counter()
    calibrator.fit(held_out, arrays["held_out_targets"])
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    probabilities = np.asarray(calibrator.predict_proba(test))
    of_target = probabilities[np.arange(len(probabilities)), arrays["test_targets"]]
    nll = float(-np.log(of_target).mean())
    print(json.dumps({"nll": nll, "seconds": seconds, "peak_GB": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
