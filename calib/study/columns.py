"""The measures that a study's tables show, and those it ranks and tests."""

from dataclasses import dataclass

from calib.report.methods import Measure

ACCURACY = Measure("accuracy", "Acc.", percent=True, higher_is_better=True)
ECE = Measure("ece", "ECE", percent=True)
ADAPTIVE_ECE = Measure("adaptive_ece", "AECE", percent=True)
CLASSWISE_ECE = Measure("classwise_ece", "cwECE", percent=True)
OVER_ECE = Measure("over_ece", "O-ECE", percent=True)
UNDER_ECE = Measure("under_ece", "U-ECE", percent=True)
NLL = Measure("nll", "NLL")
BRIER = Measure("brier", "Brier")

RANKED = (ECE, ADAPTIVE_ECE, CLASSWISE_ECE, NLL, BRIER)
TESTED = (ACCURACY, ECE, NLL)


@dataclass(frozen=True)
class Column:
    """A measure of a row as it is, or after temperature scaling.

    Attributes:
        marked: its best value is printed bold. Half of an error is not better for being smaller.
    """

    measure: Measure
    scaled: bool = False
    marked: bool = True

    @property
    def key(self) -> str:
        return f"{self.measure.key}_scaled" if self.scaled else self.measure.key

    @property
    def title(self) -> str:
        unit = " %" if self.measure.percent else ""
        return self.measure.title + (" + TS" if self.scaled else "") + unit


MEASURED = (
    Column(ACCURACY),
    Column(ECE),
    Column(ADAPTIVE_ECE),
    Column(CLASSWISE_ECE),
    Column(OVER_ECE, marked=False),
    Column(UNDER_ECE, marked=False),
    Column(NLL),
    Column(BRIER),
)
SCALED = (Column(ECE, scaled=True), Column(NLL, scaled=True))
