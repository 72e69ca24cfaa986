"""The labelled images: found, decoded and split; and what a training makes of them."""

from collections.abc import Iterator

from flows.doctor.finding import OK, UNCHECKED, WARNING, Finding
from flows.doctor.subject import Subject


def check(subject: Subject) -> Iterator[Finding]:
    if subject.real is None:
        yield Finding("real images", UNCHECKED, "no config was given")
        return
    from data.real import load_real

    decoded = ""
    if subject.real.name == "imagefolder":
        from flows.build_start import survey_images

        surveyed = survey_images(subject.real)
        decoded = f"; {surveyed.images - len(surveyed.bad)} of {surveyed.images} can be decoded"
        for note in surveyed.notes():
            yield Finding("picture folder", WARNING, note)
    real = load_real(subject.real)
    counts = f"{len(real.train)} to train, {len(real.test)} to test"
    yield Finding("real images", OK, f"{len(real.class_names)} classes, {counts}{decoded}")


def check_training(subject: Subject) -> Iterator[Finding]:
    """What a training finds before its first step."""
    if (config := subject.train) is None:
        return
    from calib.check import check as check_config
    from calib.check import check_launch
    from calib.features import check_memory
    from calib.real_data import open_data

    check_config(config)
    check_launch(config, processes=1)
    if config.mixed is not None:  # their size is enough: whether each decodes `verify --full` says
        mixed = config.mixed.model_copy(update={"memory_gib": 0.0})
        config = config.model_copy(update={"mixed": mixed})
    data = open_data(config)
    check_memory(config, images=len(data.real.train), num_classes=data.num_classes)
    yield Finding("training", OK, "losses, networks, real and mixed images fit together")
