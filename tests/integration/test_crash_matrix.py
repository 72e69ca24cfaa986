"""A shard's publication is interrupted at every step: by a kill, or by a full disk."""

import shutil
import signal

import pytest

from semix.data.root import Root
from semix.data.verify import damage
from semix.pipeline.worker import main as worker
from tests.integration.conftest import contents
from tests.integration.crashes import at_step, die, fill_disk, in_child

pytestmark = pytest.mark.process

STEPS_OF_A_SHARD = 16  # at least as many as publishing one shard takes; the last ones do nothing


@pytest.fixture(scope="module")
def first_shard_made(tiny, tmp_path_factory) -> Root:
    """A root whose first shard is committed."""
    root = tiny.start(str(tmp_path_factory.mktemp("begun")))
    tiny.make(root, 0)
    return root


@pytest.fixture
def root(first_shard_made, tmp_path) -> Root:
    shutil.copytree(first_shard_made.url, tmp_path / "mixed")
    return Root(str(tmp_path / "mixed"))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(STEPS_OF_A_SHARD))
def test_killed_at_a_step_of_publishing(tiny, unbroken, root, step, after):
    def work() -> None:
        with at_step(step, die, after=after):
            tiny.make(root, 1)

    code = in_child(work)
    assert code in (0, -signal.SIGKILL)
    reopened = Root(root.url)
    assert 0 in reopened.done()
    assert damage(reopened, full=True) == [], "what is committed is whole"
    finished = tiny.finish(reopened)
    finished.store.sweep()
    assert contents(finished) == unbroken


@pytest.mark.parametrize("step", range(0, 2 * STEPS_OF_A_SHARD, 4))
def test_a_worker_is_killed_while_it_publishes_a_shard_and_makes_the_next(
    tiny, unbroken, root, step, monkeypatch
):
    monkeypatch.setattr("semix.pipeline.shard.load_models", lambda *_, **__: tiny.models)

    def work() -> None:
        with at_step(step, die, after=False):
            worker([root.url, "--device", "cpu"])

    assert in_child(work) == -signal.SIGKILL
    reopened = Root(root.url)
    assert 0 in reopened.done()
    assert damage(reopened, full=True) == [], "what is committed is whole"
    assert worker([root.url, "--device", "cpu"]) == 0
    assert contents(Root(root.url)) == unbroken


@pytest.mark.parametrize("step", range(STEPS_OF_A_SHARD))
def test_the_disk_is_full_at_a_step_of_publishing(tiny, unbroken, root, step):
    def work() -> None:
        with at_step(step, fill_disk, after=False):
            tiny.make(root, 1)

    code = in_child(work)
    assert code in (0, 1)
    reopened = Root(root.url)
    assert damage(reopened, full=True) == []
    assert contents(tiny.finish(reopened)) == unbroken


def test_the_matrix_reaches_every_step(tiny, root):
    """STEPS_OF_A_SHARD is at least the number of steps."""

    def work() -> None:
        with at_step(STEPS_OF_A_SHARD - 1, die, after=False):
            tiny.make(root, 1)

    assert in_child(work) == 0
    assert in_child(lambda: killed_at_first_step(tiny, root)) == -signal.SIGKILL


def killed_at_first_step(tiny, root) -> None:
    with at_step(0, die, after=False):
        tiny.make(root, 2)
