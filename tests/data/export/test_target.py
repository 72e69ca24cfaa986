import pytest

from data.errors import InputError
from data.export.target import new_target


def test_a_file_or_folder_appears_whole(tmp_path):
    for name in ("file", "deep/folder"):
        with new_target(tmp_path / name) as partial:
            assert partial.parent == (tmp_path / name).parent
            if name == "file":
                partial.write_text("x")
            else:
                (partial / "a").mkdir(parents=True)
                (partial / "a" / "b").write_text("x")
            assert not (tmp_path / name).exists()
    assert (tmp_path / "file").read_text() == (tmp_path / "deep/folder/a/b").read_text() == "x"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "deep", "file", "folder"]


def test_what_is_there_is_never_touched(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with (
            pytest.raises(InputError, match=f"--to = .*/{name}: is there already"),
            new_target(tmp_path / name),
        ):
            raise AssertionError("must not get here")
    with (
        pytest.raises(InputError, match=r"--to = .*/late: is there already"),
        new_target(tmp_path / "late") as partial,
    ):
        partial.write_text("ours")
        (tmp_path / "late").write_text("theirs")
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "late").read_text() == "theirs"


def test_nothing_is_left_of_what_failed(tmp_path):
    for is_folder in (True, False):
        with pytest.raises(OSError, match="No space"), new_target(tmp_path / "new") as partial:
            if is_folder:
                partial.mkdir()
            (partial / "x" if is_folder else partial).write_text("half")
            raise OSError("No space left on device")
    assert list(tmp_path.iterdir()) == []
