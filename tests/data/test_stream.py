"""A mixed dataset as a webdataset pipeline, and both ways of reading over ranks and workers."""

import multiprocessing
import os
import socket
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader, DistributedSampler

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.root import Root
from semix.data.stream import mixed_pipeline
from tests import handmade

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, GROUPS, COUNT = 6, 3, 4
EVERY = [(group, position) for group in range(SHARDS * GROUPS) for position in range(COUNT)]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    return handmade.make_root(tmp_path_factory.mktemp("mixed"), SHARDS, GROUPS, count=COUNT).url


def keys_of(samples: Any) -> list[tuple[int, int]]:
    """Series number and position of every image in samples, or in batches of them."""
    keys: list[tuple[int, int]] = []
    for sample in samples:
        groups, positions = (np.atleast_1d(sample[key]) for key in ("group", "position"))
        keys += zip(groups.tolist(), positions.tolist(), strict=True)
    return keys


def test_a_sample_is_an_image_with_its_own_pixels_label_and_numbers(url):
    samples = list(mixed_pipeline(url))
    assert sorted(keys_of(samples)) == EVERY
    for sample in samples:
        group, position = sample["group"], sample["position"]
        record = handmade.record(group, COUNT)
        assert sample["__key__"] == f"{group:08d}-{position:02d}"
        tar = Root(url).record(group // GROUPS).tar
        assert sample["__url__"] == f"{url}/{tar}"
        assert sample["image"].dtype == np.uint8
        np.testing.assert_array_equal(sample["image"], handmade.pixels(group, COUNT, 8)[position])
        assert sample["alpha"] == record["alphas"][position]
        assert sample["weight"] == record["weights"][position]
        expected = np.zeros(3, dtype=np.float32)
        for target, probability in record["labels"][position]:
            expected[target] = probability
        np.testing.assert_array_equal(sample["label"], expected)


def test_a_sample_may_be_a_whole_series_as_of_the_dataset(url):
    mixed = MixedDataset(url)
    samples = list(mixed_pipeline(url, series=True))
    assert sorted(sample["group"] for sample in samples) == list(range(SHARDS * GROUPS))
    for sample in samples:
        same = mixed[sample["group"]]
        for key in ("images", "labels", "alphas", "weights"):
            torch.testing.assert_close(torch.from_numpy(sample[key]), same[key], rtol=0, atol=0)


def sparse(label):
    return [(target, probability) for target, probability in label]


def test_labels_may_be_sparse(url):
    for sample in mixed_pipeline(url, dense=False):
        record = handmade.record(sample["group"], COUNT)
        assert sample["label"] == sparse(record["labels"][sample["position"]])
    for sample in mixed_pipeline(url, dense=False, series=True):
        labels = handmade.record(sample["group"], COUNT)["labels"]
        assert sample["labels"] == [sparse(image) for image in labels]


def test_labels_are_those_of_the_dataset_sharpened_or_of_a_set(tmp_path):
    root = handmade.make_root(tmp_path, 1, 2, count=COUNT)
    labels = handmade.label_set(root)
    groups = [
        handmade.labels_of(group, COUNT, weights=[1.0] * COUNT, labels=[[(2, 1.0)]] * COUNT)
        for group in range(2)
    ]
    labels.commit(0, images=root.record(0).sha256, groups=groups)
    for options in ({"scale": 4.0}, {"labels": labels.digest[:6]}):
        mixed = MixedDataset(root.url, **options)
        for sample in mixed_pipeline(root.url, **options):
            expected = mixed.labels[sample["group"], sample["position"]]
            torch.testing.assert_close(torch.from_numpy(sample["label"]), expected)


def test_excluded_series_are_left_out(tmp_path):
    backwards = {1: {"weights": [0.9, 0.6, 0.4, 0.1]}}
    samples = [handmade.sample(group, COUNT, **backwards.get(group, {})) for group in range(4)]
    url = handmade.root_of(tmp_path, samples, handmade.NAMES).url
    keys = keys_of(mixed_pipeline(url, exclude=Exclusion(monotone=True)))
    assert sorted({group for group, _ in keys}) == [0, 2, 3]
    with pytest.raises(InputError, match=r"exclude\.flagged = still: .* was not audited"):
        mixed_pipeline(url, exclude=Exclusion(flagged=("still",)))


def test_rules_that_leave_nothing_are_refused_at_the_end_of_the_first_pass(tmp_path):
    samples = [handmade.sample(group, COUNT, weights=[0.9, 0.6, 0.4, 0.1]) for group in range(4)]
    url = handmade.root_of(tmp_path, samples, handmade.NAMES).url
    with pytest.raises(InputError, match=r"^exclude = monotone True: leaves none of 4 series; "):
        keys_of(mixed_pipeline(url, exclude=Exclusion(monotone=True)))


def test_the_order_is_that_of_seed_and_epoch(url):
    first = keys_of(mixed_pipeline(url, seed=3))
    assert keys_of(mixed_pipeline(url, seed=3)) == first != EVERY
    assert keys_of(mixed_pipeline(url, seed=4)) != first
    stream = mixed_pipeline(url, seed=3, epoch=1)
    second = keys_of(stream)
    assert second == keys_of(stream) != first  # the same until another is set
    stream.set_epoch(0)
    assert keys_of(stream) == first
    tuples = stream.to_tuple("group", "position")
    stream.set_epoch(1)
    assert list(tuples) == second


def test_without_a_buffer_whole_shards_come_in_a_random_order(url):
    shards = [group // GROUPS for group, _ in keys_of(mixed_pipeline(url, shuffle=0))]
    order = shards[:: GROUPS * COUNT]
    assert sorted(order) == list(range(SHARDS)) != order
    assert shards == [shard for shard in order for _ in range(GROUPS * COUNT)]


def test_further_passes_have_orders_of_their_own_and_come_again(url):
    stream = mixed_pipeline(url).with_epoch(2 * len(EVERY))
    keys = keys_of(stream)
    passes = keys[: len(EVERY)], keys[len(EVERY) :]
    assert sorted(passes[0]) == sorted(passes[1]) == EVERY
    assert passes[0] != passes[1]
    assert keys_of(stream) == keys


def test_a_damaged_picture_is_named_when_it_is_its_turn(tmp_path):
    samples = [handmade.sample(group, 2) for group in range(3)]
    samples[1].images[1] = b"RIFF" + bytes(60)
    root = handmade.root_of(tmp_path, samples, handmade.NAMES)
    samples_read = iter(mixed_pipeline(root.url, shuffle=0))
    assert keys_of([next(samples_read) for _ in range(3)]) == [(0, 0), (0, 1), (1, 0)]
    tar = root.record(0).tar
    with pytest.raises(ValueError, match=rf"{tar}: group 1, image 1: .*semix verify --full"):
        next(samples_read)


def test_a_damaged_shard_is_named(tmp_path):
    root = handmade.make_root(tmp_path, 1, 2)
    tar = root.record(0).tar
    root.store.put(tar, root.store.get(tar)[:-600])
    with pytest.raises(ValueError, match=rf"{tar}: [\d,]+ bytes, its record says"):
        list(mixed_pipeline(root.url))


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_share_out_the_shards_and_learn_of_the_epoch(url, context):
    stream = mixed_pipeline(url, seed=5)
    options = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    loader = wds.WebLoader(stream, batch_size=4, **options)
    epochs = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        epochs.append(keys_of(loader))
    assert sorted(epochs[0]) == sorted(epochs[1]) == EVERY
    assert epochs[0] == epochs[2] != epochs[1]


@pytest.mark.process
def test_more_workers_than_shards_still_see_everything_once(url):
    assert sorted(keys_of(DataLoader(mixed_pipeline(url), num_workers=8))) == EVERY


def test_a_stream_from_s3(bucket):
    stream = mixed_pipeline(handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT).url)
    assert sorted(keys_of(stream)) == EVERY
    assert sorted(keys_of(DataLoader(stream, batch_size=4, num_workers=2))) == EVERY


def _stream(url: str, prepared: bool) -> list[list]:
    """The images that a process of accelerate with two workers sees in two epochs."""
    accelerator = _accelerator()
    stream = mixed_pipeline(url, seed=1)
    loader = wds.WebLoader(stream, batch_size=4, num_workers=2)
    loader = accelerator.prepare(loader) if prepared else loader
    epochs = []
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        epochs.append(keys_of(loader))
    return epochs


def _map_style(url: str, prepared: bool) -> list[list]:
    """The same for the dataset: split by torch's own sampler, or by accelerate."""
    accelerator = _accelerator()
    images = MixedDataset(url, memory_limit=0).by_image()
    options = {"batch_size": 4, "num_workers": 2}
    if prepared:
        loader = accelerator.prepare(DataLoader(images, shuffle=True, **options))
    else:
        loader = DataLoader(images, sampler=DistributedSampler(images, seed=1), **options)
    epochs = []
    for epoch in (0, 1):
        (loader if prepared else loader.sampler).set_epoch(epoch)
        epochs.append(keys_of(loader))
    return epochs


def _accelerator():
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    assert accelerator.num_processes == 2
    return accelerator


READERS = (_stream, _map_style)


def _read_as(rank: int, url: str, port: int, results: "multiprocessing.Queue") -> None:
    # As in a process of accelerate; one that was spawned would spawn its loaders' workers, too.
    multiprocessing.set_start_method("fork", force=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    results.put((rank, [see(url, prepared) for see in READERS for prepared in (False, True)]))


@pytest.mark.process
def test_two_accelerate_processes_with_two_workers_see_every_image_once_an_epoch(url):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_read_as, args=(r, url, port, results)) for r in (0, 1)]
    for process in ranks:
        process.start()
    epochs_by_rank = dict(results.get(timeout=240) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    for first, second in zip(epochs_by_rank[0], epochs_by_rank[1], strict=True):
        for first_epoch, second_epoch in zip(first, second, strict=True):
            assert first_epoch and second_epoch
            assert sorted(first_epoch + second_epoch) == EVERY
        assert first[0] != first[1]  # of the epochs
