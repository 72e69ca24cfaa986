"""The labelled images: found, split, and one of them read."""

from collections.abc import Iterator

from flows.doctor.finding import OK, UNCHECKED, Finding
from flows.doctor.subject import Subject


def check(subject: Subject) -> Iterator[Finding]:
    if subject.real is None:
        yield Finding("real images", UNCHECKED, "no config was given")
        return
    from data.real import load_real

    real = load_real(subject.real)
    real.train.images([0])
    counts = f"{len(real.train)} to train, {len(real.test)} to test"
    yield Finding("real images", OK, f"{len(real.class_names)} classes, {counts}")
    if subject.train is not None:
        from calib.config import check as check_training

        check_training(subject.train)
        yield Finding("training", OK, "losses, networks and mixed images fit together")
