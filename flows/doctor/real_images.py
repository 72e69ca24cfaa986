"""The labelled images: found, decoded and split."""

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
            remedy = "PNG, JPEG and WebP files directly in the folder of a class are read"
            yield Finding("picture folder", WARNING, note, remedy)
    real = load_real(subject.real)
    counts = f"{len(real.train)} to train, {len(real.test)} to test"
    yield Finding("real images", OK, f"{len(real.class_names)} classes, {counts}{decoded}")
    if subject.train is not None:
        from calib.config import check as check_training

        check_training(subject.train)
        yield Finding("training", OK, "losses, networks and mixed images fit together")
