"""Files that are replaced as a whole."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from vprop.files import path_of, replacing, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_new_content_takes_the_place_of_the_old(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    with replacing(target) as part:
        assert part.parent == tmp_path  # a rename across file systems would be a copy
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path, error):
    (tmp_path / "file").write_text("old")

    def break_off():
        with replacing(tmp_path / "file") as part:
            part.write_text("half of the ne")
            raise error

    with pytest.raises(error):
        break_off()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_an_interrupt_while_the_file_is_made_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_text(tmp_path / "file", "new")
    assert names(tmp_path) == []


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664])
def test_the_mode_of_an_old_file_is_kept(tmp_path, mode):
    target = tmp_path / "file"
    target.write_text("old")
    target.chmod(mode)
    with replacing(target) as part:
        assert stat.S_IMODE(part.stat().st_mode) & ~mode == 0  # no one reads it who could not before
        part.unlink()  # as safetensors does, which puts a private file into its place
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
    assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_new_file_has_the_mode_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "ours", "text")
        (tmp_path / "any").write_text("text")
    finally:
        os.umask(before)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to("folder/target")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path / "folder") == ["target"]


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_name_as_long_as_names_can_be(tmp_path):
    write_text(tmp_path / ("x" * 255), "new")
    assert names(tmp_path) == ["x" * 255]


def make_folder(path):
    path.mkdir()


def make_pipe(path):
    os.mkfifo(path)


def make_ring(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "number"), [(make_folder, errno.EISDIR), (make_pipe, errno.EINVAL), (make_ring, errno.ELOOP)]
)
def test_what_is_no_file_stays_what_it_is(tmp_path, make, number):
    target = tmp_path / "target"
    make(target)
    before = target.lstat()
    with pytest.raises(OSError, match=str(target)) as caught:
        write_text(target, "new")
    assert caught.value.errno == number
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert names(tmp_path) == ["target"]


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "missing" / "file", "new")
    assert caught.value.filename == str(tmp_path / "missing")
    assert "There is no such folder; make it first" in str(caught.value)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(NotADirectoryError) as caught:
        write_text(tmp_path / "file" / "file", "new")
    assert caught.value.filename == str(tmp_path / "file" / "file")


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failure_of_the_system_leaves_the_old_file(tmp_path, monkeypatch, call):
    """A folder that may not be written to, a disk that is full when the data go out, a name that cannot be taken."""
    (tmp_path / "file").write_text("old")

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a name that the user never heard of")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_text(tmp_path / "file", "new")
    assert caught.value.filename == str(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write to all files
    with pytest.raises(PermissionError, match=str(tmp_path / "file")):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("path", [None, "", 3, 1.5, ["a"]])
def test_what_is_no_path(path):
    with pytest.raises(TypeError, match=r"save\(path\): got .* must be the name of a file, .* Pass e\.g\. "):
        path_of(path, "save(path)")


def test_kinds_of_paths(tmp_path):
    assert path_of(str(tmp_path), "") == path_of(os.fsencode(tmp_path), "") == path_of(tmp_path, "") == tmp_path
