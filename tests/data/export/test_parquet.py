import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.errors import InputError
from data.export import parquet
from data.export.hugging_face import write_hugging_face
from data.export.parquet import write_parquet
from data.export.rows import open_source
from data.images import decode_image
from tests.handmade import make_root, pixels, record


def test_every_column_holds_what_the_root_does(root, tmp_path):
    path = tmp_path / "out.parquet"
    assert write_parquet(open_source(root.url), path) == 18
    rows = pq.read_table(path).to_pylist()
    assert [(r["group"], r["position"]) for r in rows] == [
        (g, p) for g in range(6) for p in range(3)
    ]
    for row in rows:
        group, position = row["group"], row["position"]
        wanted = record(group, 3)
        np.testing.assert_array_equal(
            decode_image(row["image"]["bytes"]), pixels(group, 3, 8)[position]
        )
        assert row["image"]["path"] == f"{group:08d}.{position:02d}.webp"
        assert (row["classes"], row["names"]) == (wanted["classes"], wanted["names"])
        assert (row["alpha"], row["weight"]) == (
            wanted["alphas"][position],
            wanted["weights"][position],
        )
        label = np.zeros(3)
        for target, share in wanted["labels"][position]:
            label[target] = share
        np.testing.assert_allclose(row["label"], label, atol=1e-7)
    assert json.loads(pq.read_schema(path).metadata[b"class_names"]) == ["cat", "dog", "fox"]


def test_row_groups_are_bounded_by_rows_and_bytes(root, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MOST_ROWS", 5)
    write_parquet(open_source(root.url), tmp_path / "rows.parquet")
    found = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert [found.row_group(i).num_rows for i in range(found.num_row_groups)] == [5, 5, 5, 3]
    monkeypatch.setattr(parquet, "MOST_BYTES", 1)
    write_parquet(open_source(root.url), tmp_path / "bytes.parquet")
    assert pq.ParquetFile(tmp_path / "bytes.parquet").metadata.num_row_groups == 18


def test_the_missing_extra_is_named(root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for write in (write_parquet, write_hugging_face):
        with pytest.raises(InputError, match=r"needs pyarrow; run pip install 'semix\[export\]'"):
            write(open_source(root.url), tmp_path / "out")
    assert not (tmp_path / "out").exists()


MEMORY = """
import resource, sys
from pathlib import Path
from data.export import parquet
from data.export.parquet import write_parquet
from data.export.rows import open_source
import pyarrow.parquet

parquet.MOST_BYTES = 2**20
source = open_source(sys.argv[1])
write_parquet(source, Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_dataset(tmp_path):
    """3 MB of images, then 60 MB of them, in row groups of one."""
    peaks = []
    for shards in (1, 20):
        root = make_root(tmp_path / f"root{shards}", shards, 1, count=4, side=500)
        command = [sys.executable, "-c", MEMORY, root.url, str(tmp_path / f"{shards}.parquet")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert (tmp_path / "20.parquet").stat().st_size > 50 * 2**20
    assert peaks[1] - peaks[0] < 25, peaks
