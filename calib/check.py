"""Refuse settings that cannot be trained or measured, before anything is read or written."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from semix.calib.config import (
    MIN_IMAGES_PER_PROCESS,
    EvaluationConfig,
    MaCCalConfig,
    MixedConfig,
    ShiftConfig,
    TrainConfig,
    check_accumulation,
)
from semix.data.errors import InputError
from semix.data.label_sets import LabelSet
from semix.data.real import class_names, may_be_mirrored
from semix.data.root import Root

# Methods that change the classifier itself; their papers exclude a second head.
METHODS_WITHOUT_HEAD = ("plp", "balcal")


def check_config(config: TrainConfig) -> None:
    """Refuse settings that cannot be trained, before an image is read or a file is written.

    Raises:
        InputError: as `check_settings` and `check_modules`.
    """
    check_settings(config)
    check_modules(config)


def check_settings(config: TrainConfig) -> None:
    """Check what can be checked without torch, which takes seconds to import.

    Raises:
        InputError: settings that exclude each other; a mixed dataset that is missing, unfinished,
            of other classes, or without the label set that the settings name.
    """
    names = class_names(config.real)
    if config.head is not None and config.method.name in METHODS_WITHOUT_HEAD:
        remedy = "changes the classifier itself; leave the head out, or choose another method"
        raise InputError("method.name", config.method.name, remedy)
    if config.augment.flip and not may_be_mirrored(config.real):
        raise InputError("augment.flip", True, "a mirrored digit is no digit; switch it off")
    if config.augment.shift >= config.real.image_size:
        raise InputError("augment.shift", config.augment.shift, "stay below real.image_size")
    _check_views(config)
    check_evaluation(config.evaluation, names, image_size=config.real.image_size)
    if config.mixed is not None:
        _check_mixed(config.mixed, names)


def check_modules(config: TrainConfig) -> None:
    """Build all modules that training will build, without allocating weights.

    Raises:
        InputError: a loss, method, model or head refuses a value, or two settings exclude each
            other.
    """
    import torch

    from semix.calib.heads import build_head
    from semix.calib.network import apply_batch_norm_policy

    num_classes = len(class_names(config.real))
    with torch.device("meta"):  # shapes only: even a large model costs nothing
        _check_losses(config, num_classes)
        model = config.model.build(num_classes)
        _check_image_size(config, model.image_size)
        method = config.method.build(num_classes)
        method.adapt(model)
        if config.mixed is not None:
            apply_batch_norm_policy(model, config.mixed.batch_norm)
        if config.head is not None:
            build_head(config.head, model.num_features, num_classes)
    if method.losses is not None and config.loss.name not in method.losses:
        remedy = f"method {config.method.name} trains with {' or '.join(method.losses)}"
        raise InputError("loss.name", config.loss.name, remedy)


def check_launch(config: TrainConfig, processes: int) -> None:
    """Check, without importing torch, what every launched process would refuse.

    Raises:
        InputError: the processes cannot share a batch, or a tracker is not installed.
    """
    check_shares(config, processes)
    require_trackers(config.trackers)


def check_shares(config: TrainConfig, processes: int, *, num_images: int | None = None) -> None:
    """Raise InputError, which names the setting, if the processes cannot share a batch equally.

    Args:
        num_images: number of training images, on which a head's batch size may depend; None
            before they are counted.
    """
    sizes = {"batch_size": config.batch_size}
    if config.head is not None:
        size = config.head.batch_size
        if num_images is not None:
            size = config.head.batch_size_for(num_images)
        sizes |= {} if size is None else {"head.batch_size": size}
    for field, size in sizes.items():
        if size % processes or size // processes < MIN_IMAGES_PER_PROCESS:
            remedy = f"{processes} processes share it equally; choose a multiple of {processes}"
            raise InputError(
                field, size, f"{remedy}, with {MIN_IMAGES_PER_PROCESS} images for each at least"
            )
    check_accumulation(config.batch_size // processes, config.accumulate)


def require_trackers(names: Iterable[str]) -> None:
    """Raise InputError for the first tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            remedy = f"is not installed; run `pip install {name}`, or leave it out"
            raise InputError("trackers", name, remedy)


def _check_views(config: TrainConfig) -> None:
    if config.head is None or config.head.views is None:
        return
    if not (config.augment.shift or config.augment.flip):
        remedy = "nothing is augmented, so all views are equal; leave head.views out"
        raise InputError("head.views", config.head.views, remedy)
    if not config.head.augment:
        remedy = "head.augment is false, so all views are equal; set it to true, or leave views out"
        raise InputError("head.views", config.head.views, remedy)


def _check_image_size(config: TrainConfig, size: int | None) -> None:
    if size not in (None, config.real.image_size):
        remedy = f"the model takes {size} pixels; make real.image_size and model.image_size equal"
        raise InputError("real.image_size", config.real.image_size, remedy)


def _check_losses(config: TrainConfig, num_classes: int) -> None:
    from semix.calib.losses import build_training_loss

    losses = {"": config.loss}
    if isinstance(config.head, MaCCalConfig):
        losses["head."] = config.head.loss
    for prefix, loss in losses.items():
        try:
            build_training_loss(loss, num_classes, num_samples=1)
        except InputError as error:
            raise InputError(f"{prefix}{error.field}", error.value, error.remedy) from None


def _check_mixed(config: MixedConfig, names: tuple[str, ...]) -> None:
    try:
        root = Root(config.url)
        if config.labels is not None:
            LabelSet(root, config.labels)
    except InputError as error:
        raise InputError(f"mixed.{error.field}", error.value, error.remedy) from None
    mixed_names = tuple(root.plan.class_names)
    if mixed_names != names:
        remedy = f"its classes are {', '.join(mixed_names)}; the real data's are {', '.join(names)}"
        raise InputError("mixed.url", config.url, remedy)
    if not root.indices():
        raise InputError("mixed.url", config.url, "is not finished; run `semix resume` first")
    if config.index is not None and not root.store.exists(config.index):
        raise InputError("mixed.index", config.index, f"is not in {config.url}")


MEAN = "mean"  # key of the mean, beside the names of OOD datasets and corruptions
MAX_NAMED_CLASSES = 5  # in one error message


def check_evaluation(config: EvaluationConfig, names: Sequence[str], *, image_size: int) -> None:
    """Refuse settings under which a run cannot be measured.

    Args:
        names: the run's classes.
        image_size: side of its images, in pixels.
    Raises:
        InputError: an unknown corruption or severity, images too small to corrupt, or an
            out-of-distribution dataset that is missing or has some of the classes.
    """
    if config.shift is not None:
        _check_shift(config.shift, image_size)
    for name, real in config.ood.items():
        field = f"evaluation.ood.{name}"
        if name == MEAN:
            raise InputError(
                "evaluation.ood", name, "is the name of the mean over OOD datasets; rename this one"
            )
        try:
            ood_names = class_names(real)
        except InputError as error:
            raise InputError(f"{field}: {error.field}", error.value, error.remedy) from None
        normalised = {_normalised_name(each) for each in names}
        shared = [each for each in ood_names if _normalised_name(each) in normalised]
        if shared:
            others = len(shared) - MAX_NAMED_CLASSES
            more = f" and {others} more" if others > 0 else ""
            remedy = "the run has these classes too, so the images are not OOD; choose other images"
            raise InputError(
                f"{field} classes", ", ".join(shared[:MAX_NAMED_CLASSES]) + more, remedy
            )


def corruption_names(config: ShiftConfig) -> tuple[str, ...]:
    """The names of the corruptions; raises InputError for an unknown one."""
    from semix.calib.corruptions import EXTRA, STANDARD

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
    from semix.calib.corruptions import MIN_SIDE, SEVERITIES

    for severity in config.severities:
        if severity not in SEVERITIES:
            remedy = f"choose from {SEVERITIES[0]} to {SEVERITIES[-1]}"
            raise InputError("evaluation.shift.severities", severity, remedy)
    for field in ("corruptions", "severities"):
        values = getattr(config, field)
        if not isinstance(values, str) and len(set(values)) != len(values):
            raise InputError(f"evaluation.shift.{field}", list(values), "give each once")
    if not corruption_names(config):
        raise InputError(
            "evaluation.shift.corruptions", "[]", "name at least one corruption, or standard"
        )
    if image_size < MIN_SIDE:
        remedy = f"corruptions need sides of {MIN_SIDE} pixels; leave evaluation.shift out"
        raise InputError("real.image_size", image_size, remedy)


def _normalised_name(name: str) -> str:
    return name.strip().lower().replace("_", " ").replace("-", " ")
