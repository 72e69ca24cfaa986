"""Studies: methods x seeds x datasets as a grid of training runs, and one table of them."""

from calib.study.cells import Cell, cells_of, check_cells, choose, naming
from calib.study.config import DatasetConfig, MethodConfig, StudyConfig
from calib.study.results import read_results
from calib.study.sharing import Job, plan_jobs, take_over
from calib.study.write import STUDY, missing_cells, write_study

__all__ = [
    "STUDY",
    "Cell",
    "DatasetConfig",
    "Job",
    "MethodConfig",
    "StudyConfig",
    "cells_of",
    "check_cells",
    "choose",
    "missing_cells",
    "naming",
    "plan_jobs",
    "read_results",
    "take_over",
    "write_study",
]
