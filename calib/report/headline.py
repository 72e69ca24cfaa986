"""What the numbers say, in sentences that are true for whatever the numbers are."""

from collections.abc import Sequence

from calib.report.methods import ACCURACY, ECE, NLL, Measure, Method, paired

JUDGED = (ECE, NLL, ACCURACY)
NBSP = "\N{NO-BREAK SPACE}"  # a number stays on one line with its spread and unit


def headlines(methods: Sequence[Method]) -> list[str]:
    """One sentence for each method against the first, then one on temperature scaling."""
    baseline, *others = methods
    if not others:
        return [_alone(baseline), _after_scaling(methods)]
    return [_against(method, baseline) for method in others] + [_after_scaling(methods)]


def spread(method: Method, measure: Measure, kind: str = "plain") -> str:
    """Mean ± standard deviation with its unit, such as "4.81 ± 0.52 %"."""
    mean, sd = method.summary(measure, kind)
    text = measure.text(mean) + (f" ± {measure.text(sd)}" if sd is not None else "")
    return (text + (" %" if measure.percent else "")).replace(" ", NBSP)


def enumerate_words(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _word(measure: Measure) -> str:
    return measure.title if measure.title.isupper() else measure.title.lower()


def _alone(method: Method) -> str:
    found = enumerate_words([f"{_word(m)} {spread(method, m)}" for m in JUDGED])
    return f"Over {_seeds(len(method.seeds))}, {method.label} has mean {found}."


def _against(method: Method, baseline: Method) -> str:
    good: list[str] = []
    bad: list[str] = []
    for measure in JUDGED:
        improved = measure.improves(
            baseline.summary(measure, "plain")[0], method.summary(measure, "plain")[0]
        )
        (good if improved else bad).append(_change(method, baseline, measure))
    count = len(method.seeds)
    opening = f"Over {_seeds(count)}, {method.label} against {baseline.label}: "
    parts = [f"better in mean {enumerate_words(good)}"] if good else []
    parts += [f"not better in mean {enumerate_words(bad)}"] if bad else []
    return opening + "; ".join(parts) + "."


def _change(method: Method, baseline: Method, measure: Measure) -> str:
    values = f"{_word(measure)} ({spread(baseline, measure)} → {spread(method, measure)}"
    found = paired(method, baseline, measure, "plain")
    if found is None:
        return values + ", no shared seeds)"
    return values + f", better on {found.better} of {found.shared})"


def _after_scaling(methods: Sequence[Method]) -> str:
    found = [f"{spread(method, ECE, 'scaled')} for {method.label}" for method in methods]
    return f"After temperature scaling, mean ECE is {enumerate_words(found)}."
