"""The readers that are compared: each gives every image with its label, in every epoch."""

import pytest

from benchmarks import peer_reading, reading
from semix.data.export import write_hugging_face
from semix.data.pinned import PinnedRoot

SERIES, SIDE = 12, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    images = reading.small_crops(SERIES * 8).reshape(SERIES, 8, SIDE, SIDE, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reading.SERIES_A_SHARD, SIDE, 4)
        root = reading.write_root(folder / "root", images)
    write_hugging_face(PinnedRoot(root), folder / "huggingface")
    return folder


def expected_digest(folder) -> int:
    """As a reading of the tars without semix, webdataset and datasets has it."""
    rows = peer_reading.stored_rows(folder)
    samples = [peer_reading._decoded_sample({"image": i, "label": label}) for i, label in rows]
    return sum(peer_reading.sample_digest(*sample) for sample in samples) % 2**64


@pytest.mark.parametrize("reader", sorted(peer_reading.WITH_SEMIX))
def test_a_reader_gives_every_image_with_its_label_in_every_epoch(folder, reader):
    epoch = peer_reading.READERS[reader](folder, 16, 0)
    for number in range(2):
        measured = peer_reading.read(epoch(number), digest=True)
        assert measured["images"] == SERIES * 8
        assert measured["digest"] == expected_digest(folder)
