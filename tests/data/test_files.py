"""Folders must hold nothing but regular files of their own; only regular files are read."""

import os
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.files import (
    NoRegularFile,
    open_regular,
    read_json,
    remove_tree,
    require_own_files,
    write_json,
)
from semix.data.fingerprint import file_digest

TARGETS = {"a link to a folder": "../photos", "a link to a file": "../photos/a.jpg"}
TARGETS |= {"a link to nothing": "nothing", "a link to itself": "x", "a device": "/dev/zero"}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").write_text("precious")
    return folder


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("deep", ["", "seed-0/checkpoint"])
def test_a_link_inside_is_named(tmp_path, photos, target, deep):
    folder = tmp_path / "run" / deep
    folder.mkdir(parents=True)
    (folder / "x").symlink_to(target)
    with pytest.raises(InputError, match=rf"^out = {folder}/x: is a link, and links are"):
        require_own_files("out", tmp_path / "run")


def test_a_pipe_inside_is_named(tmp_path):
    os.mkfifo(tmp_path / "history.jsonl")
    with pytest.raises(InputError, match=r"^run = .*/history\.jsonl: is neither a file nor"):
        require_own_files("run", tmp_path)


def test_the_folder_itself_may_be_a_link_or_not_be_there(tmp_path, photos):
    (tmp_path / "data").symlink_to(photos)
    require_own_files("out", tmp_path / "data")
    require_own_files("out", tmp_path / "none")
    require_own_files("out", photos / "a.jpg")


def test_links_of_a_tracker_are_its_own(tmp_path, photos):
    """W&B keeps one to its latest run; its folder itself must be real."""
    folder = tmp_path / "run" / "seed-0" / "wandb"
    (folder / "run-1").mkdir(parents=True)
    (folder / "latest-run").symlink_to("run-1")
    require_own_files("out", tmp_path / "run")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(photos)
    with pytest.raises(InputError, match="/seed-0/wandb: is a link"):
        require_own_files("out", tmp_path / "run")


def test_a_removed_folder_takes_nothing_with_it(tmp_path, photos):
    folder, linked = tmp_path / "folder", tmp_path / "linked"
    folder.mkdir()
    (folder / "photos").symlink_to(photos)
    linked.symlink_to(photos)
    remove_tree(folder)
    remove_tree(linked)
    assert not folder.exists() and linked.is_symlink()
    assert (photos / "a.jpg").read_text() == "precious"


def test_what_is_read_is_a_regular_file(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    (tmp_path / "linked").symlink_to("a.json")
    assert read_json(tmp_path / "linked") == {"a": 1}
    assert file_digest(tmp_path / "linked") == file_digest(tmp_path / "a.json")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        for read in (open_regular, read_json, file_digest):
            with pytest.raises(NoRegularFile, match=f"/{name} is no regular file$"):
                read(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
