"""Batches: which process sees which images; augmentation, normalisation, micro-batches."""

import threading

import pytest
import torch
from torch import Tensor

from semix.calib.batches import (
    Batches,
    TrainingBatch,
    apply_changes,
    base_batches,
    kind_weights,
    sample_labels,
    split_batch,
)
from semix.calib.check import check_shares
from semix.calib.config import AugmentConfig
from semix.calib.network import Normalise
from semix.calib.real_data import open_data
from semix.calib.real_images import InMemoryImages
from semix.calib.training_data import pixel_histogram
from semix.data.dataset import MixedDataset, end_and_inner
from semix.data.errors import InputError

PLAIN = AugmentConfig(shift=0)


def numbered(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose every pixel is their index; the target is the index modulo 10."""
    indices = torch.arange(count)
    return indices.to(torch.uint8)[:, None, None, None].expand(-1, 4, 4, 3), indices % 10


def batches(count: int, batch_size: int, **options) -> Batches:
    options = {"augment": PLAIN, "device": torch.device("cpu"), **options}
    images, targets = numbered(count)
    return Batches(InMemoryImages(images), targets, batch_size=batch_size, **options)


def epoch(loader: Batches, seed: int = 0) -> list:
    return list(loader.epoch(torch.Generator().manual_seed(seed)))


def test_an_epoch_shows_every_image_once_and_in_a_new_order():
    loader = batches(12, 4)
    orders = [torch.cat([batch.indices for batch in epoch(loader, seed)]) for seed in (0, 0, 1)]
    assert sorted(orders[0].tolist()) == list(range(12))
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()
    for batch in epoch(loader):
        assert batch.images[:, 0, 0, 0].tolist() == batch.indices.tolist()
        assert batch.targets.tolist() == (batch.indices % 10).tolist()
        assert batch.mixed_images is None


def test_a_rest_is_left_out_and_a_small_set_is_one_batch():
    assert [len(batch.indices) for batch in epoch(batches(11, 4))] == [4, 4]
    small = batches(3, 128)
    assert len(small) == 1
    assert sorted(epoch(small)[0].indices.tolist()) == [0, 1, 2]


@pytest.mark.parametrize(("count", "size"), [(12, 5), (1, 4), (12, 2), (3, 4)])
def test_what_cannot_be_shared_is_refused(count, size):
    with pytest.raises(InputError, match=rf"^batch_size = {size}: 2 processes share it equally"):
        batches(count, size, processes=2)


def test_one_image_alone_is_no_batch():
    message = r"at least 2 of the 1 training images for each"
    with pytest.raises(InputError, match=rf"^batch_size = 4: .*{message}"):
        batches(1, 4)


@pytest.mark.parametrize(
    ("class_matched", "per_real"), [(True, 2), (False, 2), (True, 3), (True, 0.5), (False, 1.5)]
)
def test_two_processes_together_see_what_one_sees(mixed_url, class_matched, per_real):
    mixed = MixedDataset(mixed_url)
    options = {"mixed": mixed, "class_matched": class_matched, "per_real": per_real}
    augment = AugmentConfig(shift=1, flip=True)
    expected = epoch(batches(20, 8, augment=augment, **options))
    per_process = [
        epoch(batches(20, 8, augment=augment, process=p, processes=2, **options)) for p in (0, 1)
    ]
    assert len(expected) == len(per_process[0]) == len(per_process[1]) == 2
    for step, batch in enumerate(expected):
        first, second = per_process[0][step], per_process[1][step]
        for name in ("images", "targets", "indices", "mixed_images", "mixed_labels"):
            joined = torch.cat([getattr(first, name), getattr(second, name)])
            torch.testing.assert_close(joined, getattr(batch, name), rtol=0, atol=0)


def test_mixed_images_are_two_for_each_real_one_and_match_its_class(mixed_url):
    mixed = MixedDataset(mixed_url)
    for batch in epoch(batches(40, 20, mixed=mixed)):
        labels = batch.mixed_labels.view(20, 2, 10)
        assert batch.mixed_images.shape == (40, 16, 16, 3)
        torch.testing.assert_close(labels.sum(-1), torch.ones(20, 2))
        own_class = labels.gather(2, batch.targets[:, None, None].expand(-1, 2, 1))[..., 0]
        torch.testing.assert_close(own_class[:, 0], torch.ones(20))  # the end point
        assert set(own_class[:, 1].mul(10).round().tolist()) <= {3.0, 7.0}  # and an interior image


class Watched(MixedDataset):
    """A mixed dataset that sets an event when its n-th batch of images is read."""

    def __init__(self, url):
        super().__init__(url)
        self.read_events = [threading.Event() for _ in range(3)]

    def read(self, group, position):
        next(event for event in self.read_events if not event.is_set()).set()
        return super().read(group, position)


def test_the_next_batch_is_read_while_one_is_used(mixed_url):
    mixed = Watched(mixed_url)
    iterator = batches(60, 20, mixed=mixed).epoch(torch.Generator().manual_seed(0))
    next(iterator)
    assert mixed.read_events[1].wait(10)
    assert not mixed.read_events[2].is_set()
    iterator.close()


def test_a_batch_says_where_the_random_numbers_of_the_next_one_begin(mixed_url):
    options = {"mixed": MixedDataset(mixed_url), "augment": AugmentConfig(shift=1, flip=True)}
    expected, loader = epoch(batches(60, 20, **options)), batches(60, 20, **options)
    generator = torch.Generator().manual_seed(0)
    remainder = loader.epoch(generator, steps_done=1, generator_state=expected[0].generator_state)
    for batch, other in zip(remainder, expected[1:], strict=True):
        for name in (
            "images",
            "targets",
            "indices",
            "mixed_images",
            "mixed_labels",
            "generator_state",
        ):
            torch.testing.assert_close(getattr(batch, name), getattr(other, name), rtol=0, atol=0)
    assert generator.get_state().equal(expected[-1].generator_state)


# Series and positions in them, drawn for classes 0 to 9: pinned before the number of mixed images
# became a setting.
MATCHED = [5, 10, 18, 17, 18, 37, 35, 39, 42, 34], "31 31 32 02 01 31 02 02 02 01"
ANY = [9, 14, 35, 39, 25, 0, 22, 14, 5, 4], "32 01 32 02 31 31 02 32 32 32"


def test_two_mixed_images_are_drawn_as_ever(mixed_url):
    mixed, generator = MixedDataset(mixed_url), torch.Generator().manual_seed(5)
    for class_matched, (groups, digits) in ((True, MATCHED), (False, ANY)):
        group, position = mixed.choose(torch.arange(10), rng=generator, class_matched=class_matched)
        assert group.flatten().tolist() == groups
        assert position.tolist() == [[int(digit) for digit in pair] for pair in digits.split()]
    assert torch.randint(1000, (3,), generator=generator).tolist() == [881, 787, 379]


@pytest.mark.parametrize(
    ("per_real", "num_drawing", "per_image"),
    [(1, 20, 1), (2, 20, 2), (4, 20, 4), (0.5, 10, 1), (0.27, 5, 1), (1.5, 15, 2), (2.1, 14, 3)],
)
def test_so_many_mixed_images_are_drawn(mixed_url, per_real, num_drawing, per_image):
    steps = epoch(batches(40, 20, mixed=MixedDataset(mixed_url), per_real=per_real))
    for batch in steps:
        assert len(batch.mixed_images) == len(batch.mixed_labels) == num_drawing * per_image
        own_class = batch.targets[:num_drawing].repeat_interleave(per_image)  # the first ones draw
        assert (batch.mixed_labels.gather(1, own_class[:, None]) > 0).all()


def test_every_process_gets_equally_many_mixed_images(mixed_url):
    """0.7 of 12 real images are 8.4; four processes get 2 each."""
    options = {"mixed": MixedDataset(mixed_url), "per_real": 0.7}
    expected = epoch(batches(24, 12, **options))
    per_process = [epoch(batches(24, 12, process=p, processes=4, **options)) for p in range(4)]
    for step, batch in enumerate(expected):
        assert len(batch.mixed_images) == 8
        assert [len(steps[step].mixed_images) for steps in per_process] == [2, 2, 2, 2]
        labels = torch.cat([steps[step].mixed_labels for steps in per_process])
        torch.testing.assert_close(labels, batch.mixed_labels, rtol=0, atol=0)


def test_a_part_of_an_image_is_rounded_for_each_process(mixed_url):
    options = {"mixed": MixedDataset(mixed_url), "per_real": 0.6}  # 7.2 of 12
    counts = [
        len(epoch(batches(12, 12, processes=processes, **options))[0].mixed_images)
        for processes in (1, 2)
    ]
    assert counts == [7, 4]


def test_a_ratio_that_leaves_a_process_without_mixed_images_is_refused(mixed_url):
    mixed = MixedDataset(mixed_url)
    message = r"^mixed\.per_real = 0\.1: gives fewer than 2 mixed images for the 10 real images"
    with pytest.raises(InputError, match=message):
        batches(40, 20, mixed=mixed, per_real=0.1, processes=2)
    assert len(epoch(batches(40, 20, mixed=mixed, per_real=0.1))[0].mixed_images) == 2


def draw_positions(mixed, count: int, times: int = 400) -> torch.Tensor:
    """Positions drawn `times` times in the series 0-1; the image of class 0 is at position 3."""
    groups, targets = torch.zeros(times, dtype=torch.int64), torch.zeros(times, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    return end_and_inner(mixed.soft_labels, groups, targets, rng=generator, count=count)


def test_one_mixed_image_is_the_end_or_an_inner_one_by_a_fair_coin(mixed_url):
    counts = torch.bincount(draw_positions(MixedDataset(mixed_url), 1).flatten(), minlength=4)
    assert counts[0] == 0  # the other class's end
    assert 160 < counts[3] < 240
    assert 70 < counts[1] < 130
    assert 70 < counts[2] < 130


def test_inner_images_come_again_when_all_have_come(mixed_url):
    mixed = MixedDataset(mixed_url)
    three = draw_positions(mixed, 3)
    assert (three[:, 0] == 3).all()
    assert (three[:, 1:].sort(1)[0] == torch.tensor([1, 2])).all()
    assert 160 < (three[:, 1] == 1).sum() < 240  # in a random order
    six = draw_positions(mixed, 6)
    assert (six[:, 1:3].sort(1)[0] == torch.tensor([1, 2])).all()
    torch.testing.assert_close(six[:, 1:3], six[:, 3:5])
    assert ((six[:, 5] == 1) | (six[:, 5] == 2)).all()


def test_mixed_labels_belong_to_the_pixels_beside_them(mixed_url):
    mixed = MixedDataset(mixed_url)
    stored, labels = mixed.images.flatten(0, 1), mixed.labels.flatten(0, 1)
    for batch in epoch(batches(20, 10, mixed=mixed)):
        for image, label in zip(batch.mixed_images, batch.mixed_labels, strict=True):
            same = (stored == image).flatten(1).all(1)  # an end point is in several series
            gaps = (labels[same] - label).abs().amax(1)
            assert gaps.min() == 0


def test_shift_and_mirror_by_hand():
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 3, 3, 1).expand(-1, -1, -1, 3)

    def moved(*change: int) -> list[list[int]]:
        augment = AugmentConfig(shift=1, flip=True)
        output = apply_changes(image, torch.tensor([change]), augment)
        assert output.shape == (1, 3, 3, 3)
        return output[0, :, :, 0].tolist()

    assert moved(1, 1, 0) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]  # shift 1 is no move
    assert moved(2, 1, 0) == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]  # a row down
    assert moved(1, 0, 0) == [[2, 3, 0], [5, 6, 0], [8, 9, 0]]  # a column left
    assert moved(1, 1, 1) == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    assert moved(2, 2, 1) == [[0, 0, 0], [2, 1, 0], [5, 4, 0]]  # moved, then mirrored


def test_shifts_reach_their_limits_on_both_sides_and_no_further():
    image = torch.zeros(1, 9, 9, 3, dtype=torch.uint8)
    image[0, 4, 4] = 255
    augment = AugmentConfig(shift=2)
    loader = Batches(
        InMemoryImages(image.expand(400, -1, -1, -1)),
        torch.zeros(400, dtype=torch.int64),
        batch_size=400,
        augment=augment,
        device=torch.device("cpu"),
    )
    positions = epoch(loader)[0].images[..., 0].nonzero()[:, 1:]
    assert positions.amin(0).tolist() == [2, 2]
    assert positions.amax(0).tolist() == [6, 6]


def test_normalised_training_images_have_mean_0_and_deviation_1_in_each_channel():
    images = torch.randint(0, 256, (50, 6, 5, 3), generator=torch.Generator().manual_seed(0))
    images = (images * torch.tensor([1.0, 0.5, 0.1])).to(torch.uint8)
    output = Normalise().fit(pixel_histogram([images]))(images)
    assert output.shape == (50, 3, 6, 5)
    torch.testing.assert_close(output.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.std((0, 2, 3), correction=0), torch.ones(3))
    expected = (images[7, 2, 3, 1] - images[..., 1].float().mean()) / images[..., 1].float().std(
        correction=0
    )
    torch.testing.assert_close(output[7, 1, 2, 3], expected)


def test_one_even_colour_is_finite():
    images = torch.full((2, 3, 3, 3), 9, dtype=torch.uint8)
    torch.testing.assert_close(
        Normalise().fit(pixel_histogram([images]))(images), torch.zeros(2, 3, 3, 3)
    )


def make_batch(real: int = 6, mixed: int | None = 7) -> TrainingBatch:
    images = torch.arange(real).view(real, 1, 1, 1)
    batch = (images, torch.arange(real), torch.arange(real) + 100)
    if mixed is None:
        return TrainingBatch(*batch)
    images = torch.arange(mixed).view(mixed, 1, 1, 1)
    return TrainingBatch(*batch, images, torch.rand(mixed, 3), torch.rand(mixed, 2))


def test_weights_of_kinds_by_hand():
    # Two series of three: an end point and two inner images each.
    expected = [[0.5, 0], [0, 0.25], [0, 0.25], [0.5, 0], [0, 0.25], [0, 0.25]]
    torch.testing.assert_close(kind_weights(6, 3), torch.tensor(expected))


def test_parts_hold_everything_once_and_means_add_up():
    batch = make_batch()
    chunks = list(split_batch(batch, 3))
    names = ("images", "targets", "indices", "mixed_images", "mixed_labels", "mixed_kinds")
    for name in names:
        joined = torch.cat([getattr(chunk.batch, name) for chunk in chunks])
        torch.testing.assert_close(joined, getattr(batch, name))
    assert [len(chunk.batch.mixed_images) for chunk in chunks] == [3, 2, 2]
    mean = sum(chunk.mixed_fraction * chunk.batch.mixed_labels.mean() for chunk in chunks)
    torch.testing.assert_close(mean, batch.mixed_labels.mean())
    assert [chunk.real_fraction for chunk in chunks] == [1 / 3] * 3


def test_one_part_is_the_batch_itself():
    batch = make_batch(mixed=None)
    [chunk] = split_batch(batch, 1)
    assert chunk.batch is batch
    assert chunk.real_fraction == 1


def test_parts_without_mixed_images():
    chunks = list(split_batch(make_batch(mixed=None), 2))
    assert [chunk.batch.indices.tolist() for chunk in chunks] == [[100, 101, 102], [103, 104, 105]]
    assert all(chunk.batch.mixed_images is None for chunk in chunks)


@pytest.mark.parametrize(
    ("mixed", "count", "text"),
    [
        (None, 4, r"^accumulate = 4: the 6 real images of a process do not divide"),
        (None, 6, r"^accumulate = 6: .* equal parts of 2 images or more"),
        (5, 3, r"^accumulate = 3: the 5 mixed images of a step leave fewer than 2 per micro-batch"),
    ],
)
def test_parts_that_cannot_be_are_refused(mixed, count, text):
    with pytest.raises(InputError, match=text):
        list(split_batch(make_batch(mixed=mixed), count))


@pytest.mark.parametrize(
    ("overrides", "processes", "text"),
    [
        (
            ["batch_size=21"],
            2,
            r"^batch_size = 21: 2 processes share it equally; choose a multiple",
        ),
        (["batch_size=4"], 4, r"^batch_size = 4: .* with 2 images for each at least"),
        (["head.batch_size=21"], 2, r"^head\.batch_size = 21: 2 processes"),
        (["accumulate=4"], 2, r"^accumulate = 4: the 10 real images of a process"),
    ],
)
def test_shares_are_checked_before_anything_is_read(make_config, overrides, processes, text):
    check_shares(make_config(), processes)
    with pytest.raises(InputError, match=text):
        check_shares(make_config(*overrides), processes)


def test_a_sampled_label_is_a_class_with_its_probability():
    label = torch.tensor([0.2, 0.0, 0.5, 0.3])
    uniform = (torch.arange(1000) + 0.5) / 1000
    sampled = sample_labels(label.expand(1000, 4), uniform)
    assert sampled.sum(0).tolist() == [200, 0, 500, 300]
    assert set(sampled.unique().tolist()) == {0.0, 1.0}
    nearly = torch.full((7,), 1 / 7)  # adds up to less than 1
    assert sample_labels(nearly, torch.tensor(1 - 2**-24)).argmax() == 6


def test_labels_are_sampled_anew_each_epoch_and_alike_in_every_process(make_config, accelerator):
    config = make_config("mixed.labels_as=sampled")
    data = open_data(config)

    def epochs(process: int, processes: int) -> list[Tensor]:
        batches = base_batches(config, data, accelerator)
        assert batches.sampled_labels
        shared = Batches(
            data.images("train"),
            data.train_targets,
            batch_size=config.batch_size,
            augment=config.augment,
            device=torch.device("cpu"),
            mixed=data.mixed,
            sampled_labels=True,
            process=process,
            processes=processes,
        )
        rng = torch.Generator().manual_seed(5)
        return [torch.stack([b.mixed_labels for b in shared.epoch(rng)]) for _ in range(2)]

    first, second = epochs(0, 1)
    assert set(first.unique().tolist()) == {0.0, 1.0} and not torch.equal(first, second)
    halves = [epochs(process, 2)[0] for process in range(2)]
    assert torch.equal(torch.cat(halves, 1), first)
