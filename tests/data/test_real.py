"""Real datasets: digits, image folders, images left out of them, images that splits share."""

import errno
import io
import os
import struct

import numpy as np
import pytest
from PIL import Image

from semix.data import real as real_data
from semix.data.errors import InputError
from semix.data.imagefolder import inspect_folder
from semix.data.real import RealDataConfig, class_names, load_real
from semix.data.settings import load_settings
from semix.data.splits import ImageSplit, in_grey, shared_images


def pictures(folder, count, *, colour=0):
    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("RGB", (20, 12), (colour, index, 0)).save(folder / f"{index:02d}.png")


def test_digits_split_is_stratified_disjoint_and_fixed():
    real = load_real(RealDataConfig(name="digits"))
    assert [len(s) for s in (real.train, real.validation, real.test)] == [300, 300, 1197]
    assert (np.bincount(real.train.targets) == 30).all()
    assert (np.bincount(real.validation.targets) == 30).all()
    assert real.class_names[8] == "eight"
    images = real.train.images([0, 299])
    assert (images.shape, images.dtype) == ((2, 32, 32, 3), np.uint8)
    seen_images = [
        image.tobytes() for s in (real.train, real.validation, real.test) for image in s.images()
    ]
    assert len(set(seen_images)) == 1797
    assert real.train.digest == load_real(RealDataConfig(name="digits")).train.digest
    assert real.train.digest != load_real(RealDataConfig(name="digits", split_seed=1)).train.digest


def test_a_larger_training_set_contains_the_smaller():
    small = load_real(RealDataConfig(name="digits", train_per_class=10))
    large = load_real(RealDataConfig(name="digits", train_per_class=20))
    seen_images = {image.tobytes() for image in large.train.images()}
    assert all(image.tobytes() in seen_images for image in small.train.images())


def test_imagefolder_splits_by_itself(tmp_path):
    pictures(tmp_path / "cat", 10)
    pictures(tmp_path / "dog", 20, colour=200)
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=16)
    real = load_real(config)
    assert class_names(config) == real.class_names == ("cat", "dog")
    counts = [np.bincount(s.targets).tolist() for s in (real.train, real.validation, real.test)]
    assert counts == [[8, 16], [1, 2], [1, 2]]
    assert real.train.images().shape == (24, 16, 16, 3)
    assert real.train.images()[real.train.targets == 1][..., 0].min() == 200


def test_imagefolder_follows_given_splits(tmp_path):
    for split, count in (("train", 12), ("test", 3)):
        pictures(tmp_path / split / "cat", count)
        pictures(tmp_path / split / "dog", count, colour=9)
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=16)
    real = load_real(config)
    assert [len(s) for s in (real.train, real.validation, real.test)] == [22, 2, 6]
    pictures(tmp_path / "val" / "cat", 1)
    pictures(tmp_path / "val" / "dog", 1)
    real = load_real(config)
    assert [len(s) for s in (real.train, real.validation, real.test)] == [24, 2, 6]
    fewer = load_real(config.model_copy(update={"train_per_class": 5}))
    assert np.bincount(fewer.train.targets).tolist() == [5, 5]


def test_bad_folders_are_named(tmp_path):
    def load(path, **more):
        return load_real(RealDataConfig(name="imagefolder", path=path, **more))

    with pytest.raises(InputError, match=r"real\.path = nothing: imagefolder needs the folder"):
        load(None)
    with pytest.raises(InputError, match="there is no such folder"):
        load(str(tmp_path / "none"))
    pictures(tmp_path / "cat", 10)
    with pytest.raises(InputError, match=r"holds 1 class folder\(s\); give at least 2"):
        load(str(tmp_path))
    (tmp_path / "dog").mkdir()
    with pytest.raises(InputError, match="class 'dog' has no train images"):
        load(str(tmp_path))
    pictures(tmp_path / "ox", 2)
    (tmp_path / "dog").rmdir()
    with pytest.raises(InputError, match="class 'ox' has no test images"):
        load(str(tmp_path))
    with pytest.raises(InputError, match=r"real\.path = .*digits come with the program"):
        load_real(RealDataConfig(name="digits", path="x"))
    with pytest.raises(InputError, match=r"real\.train_per_class = 160: with 30 for validation"):
        load_real(RealDataConfig(name="digits", train_per_class=160))


def test_a_damaged_picture_is_named(tmp_path):
    for name in ("cat", "dog"):
        pictures(tmp_path / name, 10)
    for path in tmp_path.glob("cat/*.png"):
        path.write_bytes(path.read_bytes()[:60])
    real = load_real(RealDataConfig(name="imagefolder", path=str(tmp_path)))
    with pytest.raises(InputError, match=r"image = .*/cat/\d\d\.png: cannot be read"):
        real.train.images()


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (["train", "val"], "holds train and val, but no test; add or rename it, or give a folder"),
        (["train", "val", "labels"], "holds train and val, but no test;"),
        (["train"], "holds train, but no test;"),
        (["val", "test"], "holds test and val, but no train;"),
        (["Train", "Test"], "holds Test and Train, but no train and no test;"),
    ],
)
def test_folders_named_as_splits_are_no_classes(tmp_path, folders, told):
    for folder in folders:
        for name in ("cat", "dog"):
            pictures(tmp_path / folder / name, 2)
    with pytest.raises(InputError, match=rf"^real\.path = {tmp_path}: {told}"):
        load_real(RealDataConfig(name="imagefolder", path=str(tmp_path)))


def encode(kind, *more):
    buffer = io.BytesIO()
    Image.new("RGB", (99, 99)).save(buffer, kind, save_all=bool(more), append_images=more)
    return buffer.getvalue()


BAD = {
    "cut.jpg": (encode("JPEG")[:-60], "image file is truncated"),
    "empty.png": (b"", "it is empty"),
    "huge.png": (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 13_000, 13_000),
        "13000 x 13000 pixels, at most 134217728 are decoded; save it smaller",
    ),
    "moving.webp": (encode("WEBP", Image.new("RGB", (99, 99), "red")), "it is animated"),
    "page.jpg": (b"\n<!DOCTYPE html>", "it is HTML or XML, no PNG, JPEG, WebP, TIFF, BMP or GIF"),
    "phone.jpg": (b"\0\0\0\x18ftypheic", "it is HEIC, no PNG, JPEG, WebP, TIFF, BMP or GIF"),
}


@pytest.fixture
def faulty(tmp_path):
    """Twenty pictures of two classes, and one of each kind that cannot be decoded."""
    for name, colour in (("cat", 0), ("dog", 200)):
        pictures(tmp_path / name, 10, colour=colour)
    for name, (content, _) in BAD.items():
        (tmp_path / "dog" / name).write_bytes(content)
    return tmp_path


def test_a_survey_names_every_image_that_cannot_be_decoded(faulty):
    seen_images = []
    config = RealDataConfig(name="imagefolder", path=str(faulty), image_size=16)
    with pytest.raises(InputError) as caught:
        inspect_folder(config, lambda *counts: seen_images.append(counts))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"real.skip_bad = 0: 6 of 26 images in {faulty} cannot be decoded;")
    assert "replace or remove them" in first
    for line, (name, (_, reason)) in zip(lines, BAD.items(), strict=True):
        assert line.startswith(f"  dog/{name}: {reason}")
    assert seen_images == [(done, 26) for done in range(1, 27)]
    for number in range(30):
        (faulty / "cat" / f"e{number}.png").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        inspect_folder(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22 and lines[-1] == "  and 16 more"


def test_a_survey_counts_what_is_ignored(tmp_path):
    for name in ("cat", "Cat", "dog"):
        pictures(tmp_path / name, 3)
    for name in ("a.HEIC", "b.heic", "Thumbs.db", "LICENSE", "._00.png", ".DS_Store"):
        (tmp_path / "cat" / name).write_text("x")
    (tmp_path / "dog" / "more").mkdir()
    (tmp_path / "labels.csv").write_text("")
    report = inspect_folder(RealDataConfig(name="imagefolder", path=str(tmp_path)))
    assert (report.images, report.bad) == (9, {})
    assert report.notes() == [
        "classes Cat and cat differ in case alone; are they one?",
        "ignored beside 9 images: 1 .db, 2 .heic, 1 files without extension, "
        "1 folders in class folders, 1 loose files; images are PNG, JPEG, WebP, TIFF, BMP or GIF "
        "files directly in the folder of a class",
    ]


def test_hidden_files_and_folders_are_no_pictures_and_no_classes(tmp_path):
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=16)
    for name in ("cat", "dog"):
        pictures(tmp_path / name, 10)
    before = load_real(config)
    pictures(tmp_path / ".hidden", 3)
    pictures(tmp_path / "cat" / ".thumbnails", 3)
    for name in (".DS_Store", "._00.png", ".00.png", ".x.jpg"):
        (tmp_path / "cat" / name).write_bytes(b"x")
        (tmp_path / name).write_bytes(b"x")
    after, report = load_real(config), inspect_folder(config)
    assert after.class_names == ("cat", "dog") and after.train.digest == before.train.digest
    assert (report.images, report.bad, report.ignored) == (20, {}, {})


def test_a_class_without_pictures_says_what_it_holds_and_what_would_count(tmp_path):
    config = RealDataConfig(name="imagefolder", path=str(tmp_path))
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.heic").write_bytes(b"x")
    with pytest.raises(InputError) as caught:
        load_real(config)
    assert (caught.value.field, caught.value.value) == ("real.path", tmp_path)
    assert caught.value.remedy == (
        "classes 'cat' (1 .heic), 'dog' (1 .heic) have no train images; add some, PNG, JPEG, WebP, "
        "TIFF, BMP or GIF, or remove it"
    )


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "GIF"])
def test_a_folder_of_other_formats_reads_as_one_of_png(kind, tmp_path):
    suffix = {"TIFF": "TIF", "BMP": "bmp", "GIF": "gif"}[kind]
    for folder, ending, form in (("a", "png", "PNG"), ("b", suffix, kind)):
        for name, colour in (("cat", 10), ("dog", 200)):
            class_folder = tmp_path / folder / name
            class_folder.mkdir(parents=True)
            for number in range(10):
                picture = Image.new("L", (16, 16), colour + number)
                picture.save(class_folder / f"{number}.{ending}", form)
    first, second = (
        load_real(RealDataConfig(name="imagefolder", path=str(tmp_path / name), image_size=16))
        for name in "ab"
    )
    np.testing.assert_array_equal(first.train.images(), second.train.images())
    np.testing.assert_array_equal(first.test.targets, second.test.targets)


def test_bad_images_are_left_out_as_far_as_that_is_allowed(faulty, caplog):
    def load(**more):
        return load_real(
            RealDataConfig(name="imagefolder", path=str(faulty), image_size=16, **more)
        )

    for allowed in (6, 0.25):
        lenient = load(skip_bad=allowed)
        assert "left out 6 of 26 images" in caplog.text and "dog/cut.jpg: image file" in caplog.text
        caplog.clear()
    for allowed in (5, 0.2):
        with pytest.raises(InputError, match=rf"^real\.skip_bad = {allowed}: 6 of 26 images"):
            load(skip_bad=allowed)
    for name in BAD:
        (faulty / "dog" / name).unlink()
    clean = load()
    for split in ("train", "validation", "test"):
        assert getattr(lenient, split).digest == getattr(clean, split).digest


def test_what_the_disk_does_not_give_is_never_left_out(faulty, monkeypatch):
    """Another process may read it, and would train on other images."""
    original_open = os.open

    def failing_open(path, *arguments, **options):
        if str(path).endswith("/03.png"):
            raise OSError(errno.EIO, "Input/output error")
        return original_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", failing_open)
    config = RealDataConfig(name="imagefolder", path=str(faulty), skip_bad=20)
    with pytest.raises(
        InputError, match=r"2 of 26 images cannot be read; .*\n  cat/03\.png: .*Input/output"
    ):
        load_real(config)


@pytest.mark.parametrize("value", [-1, 1.0, 1.5])
def test_bad_images_are_allowed_by_count_or_share(value):
    with pytest.raises(InputError, match=r"^skip_bad = "):
        load_settings(RealDataConfig, {"name": "digits", "skip_bad": value})


def test_fewer_test_images_are_the_same_ones_and_equally_many_of_each_class():
    config = RealDataConfig(name="digits", image_size=8)
    complete, few, more = (
        load_real(config.model_copy(update={"test_per_class": count})) for count in (None, 5, 20)
    )
    assert np.bincount(few.test.targets).tolist() == [5] * 10
    assert np.bincount(more.test.targets).tolist() == [20] * 10
    large = {image.tobytes(): target for image, target in zip(*contents(more.test), strict=True)}
    for image, target in zip(*contents(few.test), strict=True):
        assert large[image.tobytes()] == target
    all_of_them = {image.tobytes() for image in complete.test.images()}
    assert set(large) <= all_of_them
    assert (few.train.images() == complete.train.images()).all()
    assert few.test.digest == load_real(config.model_copy(update={"test_per_class": 5})).test.digest
    assert len({split.test.digest for split in (complete, few, more)}) == 3
    with pytest.raises(
        InputError, match=r"^real\.test_per_class = 115: class 'eight' has 114 test"
    ):
        load_real(config.model_copy(update={"test_per_class": 115}))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train_per_class": 10}, r"train_per_class = 10: class 'cat' has 10 images, 1 of them"),
        ({"train_per_class": 9}, r"train_per_class = 9: class 'cat' has 10 images, 1 of them"),
        ({"validation_per_class": 2}, r"validation_per_class = 2: class 'cat' has 10 .*, 8 of"),
    ],
)
def test_a_size_that_leaves_nothing_to_test_on_is_named(tmp_path, sizes, message):
    for name in ("cat", "dog"):
        pictures(tmp_path / name, 10)
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=16)
    with pytest.raises(InputError, match=message):
        load_real(config.model_copy(update=sizes))


def test_reading_all_pictures_shows_progress(tmp_path):
    """A watchdog ends a process that is silent for minutes; 140 GB take longer to hash."""
    for name in ("cat", "dog"):
        pictures(tmp_path / name, 10)
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=16, skip_bad=1)
    beats = []
    train = load_real(config, heartbeat=lambda: beats.append("decoded")).train
    assert beats == ["decoded"] * 20
    digest = train.compute_digest(lambda: beats.append("hashed"))
    assert beats[20:] == ["hashed"] * len(train)
    assert train.compute_digest(lambda: beats.append("again")) == digest == train.digest
    assert beats[-1] == "hashed"
    assert load_real(config).train.digest == digest


def contents(split):
    return split.images(), split.targets.tolist()


def test_images_of_a_folder_are_called_by_their_paths(tmp_path):
    for name, colour in (("cat", 0), ("dog", 200)):
        pictures(tmp_path / name, 10, colour=colour)
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=16)
    some = {"train_per_class": 2, "validation_per_class": 1, "test_per_class": 3}
    few = load_real(config.model_copy(update=some)).test
    for index in range(6):
        path = few.name(index)
        green = int(path[-6:-4])  # as `pictures` draws them
        assert few.images([index])[0, 0, 0].tolist() == [200 * few.targets[index], green, 0]


def test_the_digits_are_those_that_scikit_learn_gives():
    from sklearn.datasets import load_digits

    images, targets = real_data._read_digits(8)
    bundled = load_digits()
    assert (images[..., 0] == np.round(bundled.images * 255 / 16)).all()
    assert (targets == bundled.target).all()


def images(*values: int) -> np.ndarray:
    """One even image for each value."""
    return np.array(values, dtype=np.uint8)[:, None, None, None] + np.zeros((2, 2, 3), np.uint8)


def test_shared_images_are_found_wherever_they_are():
    shared = shared_images(
        {
            "train": [images(1, 2, 2), images(3)],
            "validation": iter([images(4), images(2, 5)]),
            "test": [images(6, 4, 7, 3, 6)],
        }
    )
    assert shared == [
        (("validation", 1), ("train", 1)),
        (("test", 1), ("validation", 0)),
        (("test", 3), ("train", 3)),
    ]


def test_one_value_makes_a_difference():
    changed = images(1)
    changed[0, 1, 1, 2] += 1
    assert shared_images({"train": [images(1)], "test": [changed]}) == []
    assert shared_images({"train": [], "test": [images(1)]}) == []


def test_pictures_in_grey_have_the_luma_of_pillow():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    split = ImageSplit(np.arange(5), pixels.__getitem__, lambda _: "digest")
    grey = in_grey(split)
    grey_images = grey.images([1, 3])
    for image, index in zip(grey_images, (1, 3), strict=True):
        luma = np.asarray(Image.fromarray(pixels[index]).convert("L"))
        np.testing.assert_array_equal(image, np.repeat(luma[..., None], 3, axis=-1))
    assert grey.digest != split.digest
