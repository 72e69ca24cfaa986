"""One store of each kind; the same tests hold for all."""

import pytest

from semix.data.store import Store


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.process), "gs"])
def store(request, tmp_path):
    if request.param == "file":
        return Store(str(tmp_path / "root"))
    if request.param == "memory":
        return Store(f"memory://{tmp_path}")
    if request.param == "gs":
        return Store(f"{request.getfixturevalue('gs_bucket')}/some/root")
    return Store(f"{request.getfixturevalue('bucket')}/some/root")


@pytest.fixture
def quick_pauses(monkeypatch):
    """Our own pauses between attempts, shortened: faults of tests heal at once."""
    monkeypatch.setattr("semix.data.store.services.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("semix.data.store.services.MAX_PAUSE_S", 0.1)


@pytest.fixture(autouse=True)
def own_temporary_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeping counts what any dead process of this machine has left there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setattr("tempfile.tempdir", None)
