"""One self-contained HTML page that shows what was made, trained and measured."""

from calib.report.evaluation_table import print_evaluation
from calib.report.methods import load_methods
from calib.report.noise import Compared
from calib.report.page import write_report
from calib.report.tables import print_table, summary_table

__all__ = [
    "Compared",
    "load_methods",
    "print_evaluation",
    "print_table",
    "summary_table",
    "write_report",
]
