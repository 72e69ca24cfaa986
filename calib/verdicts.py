"""What a comparison of methods says: a table for a first look, and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

from semix.calib.replicates import Comparison, compare
from semix.calib.results import MethodResult, significant_change
from semix.calib.shown_measures import ACCURACY, ECE, MEASURE, NLL, Measure
from semix.calib.tables import interval_text

HEADLINE_MEASURES = (ECE, NLL, ACCURACY)
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"  # keeps a number, its deviation and its unit on one line
AS_SURE = 0.0005  # difference of confidence and accuracy that is not shown as one


@dataclass(frozen=True)
class Verdict:
    """A method in words, as trained.

    Attributes:
        correct, confidence: accuracy and mean confidence on test images, in per cent.
        gap: `2.4 points overconfident`.
        calibration, accuracy: against the baseline: `better`, `worse`, `no significant difference`,
            or why that cannot be said; `baseline` for itself.
        change: of ECE against the baseline, with its interval; empty for itself.
        best: whether no other method has a lower ECE.
    """

    label: str
    correct: str
    confidence: str
    gap: str
    calibration: str
    accuracy: str
    change: str
    best: bool


def verdicts(methods: Sequence[MethodResult]) -> list[Verdict]:
    """One line per method; the first method is the baseline."""
    baseline, *others = methods
    lowest = min(method.summary(ECE).mean for method in methods)
    return [_verdict(baseline, None, lowest), *(_verdict(m, baseline, lowest) for m in others)]


def _verdict(method: MethodResult, baseline: MethodResult | None, lowest: float) -> Verdict:
    accuracy, confidence = method.summary(ACCURACY).mean, mean_confidence(method)
    calibration, against, change = "baseline", "baseline", ""
    if baseline is not None:
        ece, correct = (_comparison(method, baseline, measure) for measure in (ECE, ACCURACY))
        calibration, against = _in_words(ece, ECE), _in_words(correct, ACCURACY)
        change = _change_of(ece, ECE) if ece else ""
    return Verdict(
        method.label,
        ACCURACY.text(accuracy),
        ACCURACY.text(confidence),
        _gap_in_words(confidence - accuracy),
        calibration,
        against,
        change,
        method.summary(ECE).mean == lowest,
    )


def mean_confidence(method: MethodResult) -> float:
    """Mean confidence on test images: accuracy, and what is claimed beyond it in each bin."""
    over, under = (method.summary(MEASURE[key]).mean for key in ("over_ece", "under_ece"))
    return method.summary(ACCURACY).mean + over - under


def _comparison(new: MethodResult, old: MethodResult, measure: Measure) -> Comparison | None:
    return compare(new.resamples(measure), old.resamples(measure))


def _in_words(test: Comparison | None, measure: Measure) -> str:
    if test is None:
        return "no shared seed"
    return significant_change(test, measure) or test.too_few or "no significant difference"


def _gap_in_words(gap: float) -> str:
    if abs(gap) < AS_SURE:
        return "as sure as it is correct"
    return f"{100 * abs(gap):.1f} points {'over' if gap > 0 else 'under'}confident"


def first_sentence(methods: Sequence[MethodResult], lines: Sequence[Verdict]) -> str:
    """Which method is calibrated best, by how much, and how certain that is.

    Args:
        lines: the verdicts of these methods.
    """
    if len(methods) == 1:
        return _summary_sentence(methods[0])
    baseline, best = lines[0], next(line for line in lines if line.best)
    claim = f"on average it is {best.confidence} % confident and {best.correct} % correct"
    text = f"{best.label} is calibrated best as trained: {claim}"
    if best is baseline:
        return f"{text}; no other method has a lower ECE."
    text += f"; {baseline.label} is {baseline.confidence} % confident and {baseline.correct} %"
    certainty = {
        "better": "the difference in ECE is significant",
        "no significant difference": "the difference in ECE is not significant",
    }
    return f"{text} correct ({certainty.get(best.calibration, best.calibration)}).".replace(
        " %", f"{NO_BREAK_SPACE}%"
    )


def headlines(methods: Sequence[MethodResult]) -> list[str]:
    """One sentence per method that compares it with the first, then one on temperature scaling.

    The sentences are true for any numbers.
    """
    baseline, *others = methods
    scaled = [f"{spread(method, ECE, 'scaled')} for {method.label}" for method in methods]
    sentences = [_comparison_sentence(method, baseline) for method in others] or [
        _summary_sentence(baseline)
    ]
    return [*sentences, f"After temperature scaling, mean ECE is {enumerate_words(scaled)}."]


def spread(method: MethodResult, measure: Measure, kind: str = "plain") -> str:
    """Mean ± standard deviation with its unit, such as "4.81 ± 0.52 %"."""
    text = measure.spread(method.summary(measure, kind))
    return f"{text}{measure.unit}".replace(" ", NO_BREAK_SPACE)


def enumerate_words(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def _summary_sentence(method: MethodResult) -> str:
    means = enumerate_words([f"{_title_in_text(m)} {spread(method, m)}" for m in HEADLINE_MEASURES])
    return f"Over {_number_of_seeds(method)}, {method.label} has mean {means}."


def _comparison_sentence(method: MethodResult, baseline: MethodResult) -> str:
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "": []}
    for measure in HEADLINE_MEASURES:
        test = _comparison(method, baseline, measure)
        verdict = significant_change(test, measure) if test else ""
        by_verdict[verdict].append(_change_text(method, baseline, measure, test))
    words = {"better": "better in", "worse": "worse in", "": "no significant difference in"}
    parts = [f"{words[key]} {enumerate_words(each)}" for key, each in by_verdict.items() if each]
    over = f"Over {_number_of_seeds(method)}, {method.label} against {baseline.label}"
    return f"{over}: {'; '.join(parts)}."


def _change_text(
    new: MethodResult, old: MethodResult, measure: Measure, test: Comparison | None
) -> str:
    means = f"{spread(old, measure)} → {spread(new, measure)}"
    if test is None:
        return f"{_title_in_text(measure)} ({means}, no shared seeds)"
    reason = f"; {test.too_few}" if test.too_few else ""
    return f"{_title_in_text(measure)} ({means}, change {_change_of(test, measure)}{reason})"


def _change_of(test: Comparison, measure: Measure) -> str:
    """`−1.70 [−2.18, −1.17]`."""
    change = measure.text(test.change, signed=True)
    return f"{change} {interval_text(test, measure)}".rstrip()


def _number_of_seeds(method: MethodResult) -> str:
    count = len(method.seeds)
    return "1 seed" if count == 1 else f"{count} seeds"


def _title_in_text(measure: Measure) -> str:
    return measure.title if measure.title.isupper() else measure.title.lower()
