"""Parts of the second stage: what trains a head, the features it sees, which epoch is kept."""

from calib.second_stage.build import build_objective
from calib.second_stage.objective import Objective

__all__ = ["Objective", "build_objective"]
