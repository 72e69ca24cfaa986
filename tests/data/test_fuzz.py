"""Random damage: a reader answers with what it read, or with an error that names the thing."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from data.tensors import read_tensors
from tests.fuzz.mutations import blindly, mutate
from tests.fuzz.targets import attempt, targets
from tests.handmade import pixels, record

ROOT = Path(__file__).parents[2]
INPUTS = 25_000
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}
TARGETS = targets()


def drive(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.fuzz.drive", *options]
    return subprocess.run(command, cwd=ROOT, env=ALONE, capture_output=True, text=True)


@pytest.mark.process
def test_many_thousand_mutated_files(tmp_path):
    """In 512 MiB, two seconds an input, and no surprise; the process tells which input it was."""
    note = tmp_path / "note"
    done = drive("--inputs", str(INPUTS), "--note", str(note))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nat input {note.read_text()}"
    counts = json.loads(done.stdout)
    assert sum(counts.values()) == INPUTS
    # Some changes do no harm; if all did, or none, this would test little.
    for kind in TARGETS:
        assert counts[f"{kind} read"] > 0, kind
        assert counts[f"{kind} refused"] > 500, kind


@pytest.mark.process
def test_the_drive_tells_which_input_it_was():
    """Else the test above could not fail: here no input is quick enough."""
    done = drive("--inputs", "40", "--longest", "0")
    assert done.returncode == 1
    assert "--seed 0 --kind shard --only 0, " in done.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*record(3), "mixture", "agreement"]), JSON))
def test_any_json_value_in_a_record_of_a_series(changes):
    attempt(TARGETS["group"], json.dumps(record(3) | changes).encode())


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=2000))
def test_any_bytes(kind, content):
    attempt(TARGETS[kind], content)


def test_mutated_tensor_files():
    good = save({"features": pixels(0, 4, 8)[..., 0].astype("float16")}, {"encoder": "{}"})
    read = 0
    for number in range(2000):
        rng = random.Random(number)
        content = blindly(mutate(good, rng, kind="image") if number % 3 else good, rng)
        try:
            read_tensors(content, where="shards/x")
            read += 1
        except ValueError as error:
            assert type(error) is ValueError and str(error).startswith("shards/x: ")
    assert 0 < read < 1500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        *(("shard", 150_000), ("image", 300_000), ("group", 300_000)),
        *(("commit", 100_000), ("index", 100_000), ("labels", 100_000)),
    ],
)
def test_coverage_guided(kind, runs, tmp_path):
    """libFuzzer's limit counts the instrumented interpreter too, and stops at 5 s an input."""
    pytest.importorskip("atheris")
    (tmp_path / "corpus").mkdir()
    # A process starts with the peak memory of the one that starts it, so a small one does.
    small = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = [sys.executable, "-c", small, sys.executable, "-m", "tests.fuzz.coverage_guided"]
    command += [kind, str(tmp_path / "corpus")]
    limits = [f"-runs={runs}", "-rss_limit_mb=512", "-timeout=5", "-max_len=40000", "-seed=1"]
    done = subprocess.run(
        [*command, *limits, f"-artifact_prefix={tmp_path}/", "-max_total_time=90"],
        cwd=ROOT,
        env=ALONE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
