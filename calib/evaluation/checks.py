"""Find what cannot be measured before anything is trained or read."""

from collections.abc import Sequence

from calib.config.evaluation import EvaluationConfig, ShiftConfig
from data.errors import InputError
from data.real import class_names

MEAN = "mean"  # a key beside the names of datasets and corruptions
SHOWN = 5  # names in one message


def check_evaluation(config: EvaluationConfig, names: Sequence[str], *, image_size: int) -> None:
    """Refuse settings that nobody could measure.

    Args:
        names: the run's classes.
        image_size: pixels of a side of its images.
    Raises:
        InputError: an unknown corruption or severity, images too small to corrupt, or an
            out-of-distribution dataset that is not there or shows some of the classes.
    """
    if config.shift is not None:
        _check_shift(config.shift, image_size)
    for name, real in config.ood.items():
        field = f"evaluation.ood.{name}"
        if name == MEAN:
            raise InputError("evaluation.ood", name, "is what the mean over sets is called")
        try:
            found = class_names(real)
        except InputError as error:
            raise InputError(f"{field}: {error.field}", error.value, error.remedy) from None
        known = {_plain(own) for own in names}
        shared = [other for other in found if _plain(other) in known]
        if shared:
            more = f" and {len(shared) - SHOWN} more" if len(shared) > SHOWN else ""
            remedy = "the run has these classes too, so its images are not foreign; choose others"
            raise InputError(f"{field} classes", ", ".join(shared[:SHOWN]) + more, remedy)


def corruption_names(config: ShiftConfig) -> tuple[str, ...]:
    """Raises InputError for a name that is no corruption."""
    from data.corruptions import EXTRA, STANDARD

    if config.corruptions == "standard":
        return STANDARD
    if config.corruptions == "all":
        return STANDARD + EXTRA
    for name in config.corruptions:
        if name not in STANDARD + EXTRA:
            remedy = f"choose from {', '.join(STANDARD + EXTRA)}"
            raise InputError("evaluation.shift.corruptions", name, remedy)
    return config.corruptions


def _check_shift(config: ShiftConfig, image_size: int) -> None:
    from data.corruptions.kinds import SEVERITIES, SMALLEST

    for severity in config.severities:
        if severity not in SEVERITIES:
            remedy = f"choose from {SEVERITIES[0]} to {SEVERITIES[-1]}"
            raise InputError("evaluation.shift.severities", severity, remedy)
    for field in ("corruptions", "severities"):
        values = getattr(config, field)
        if not isinstance(values, str) and len(set(values)) != len(values):
            raise InputError(f"evaluation.shift.{field}", list(values), "give each once")
    if not corruption_names(config):
        raise InputError("evaluation.shift.corruptions", "[]", "name at least one, or standard")
    if image_size < SMALLEST:
        remedy = f"corruptions need {SMALLEST} pixels of a side; leave evaluation.shift out"
        raise InputError("real.image_size", image_size, remedy)


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ").replace("-", " ")
