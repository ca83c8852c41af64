"""Result files are whole or absent."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvq import fileio
from kvq.errors import ConfigError


def test_text_is_written_as_utf8_readable_and_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old and longer than what comes")
    fileio.write_text(target, "\u00fc 4.5 bits\n")
    assert target.read_bytes() == b"\xc3\xbc 4.5 bits\n"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("failing", ["replace", "chmod", "open"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_a_failure_at_any_step_keeps_the_old_file_and_leaves_nothing_beside_it(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    expected = ConfigError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        fileio.write_text(target, "new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(params=[0o077, 0o027, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_gets_what_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    fileio.write_text(tmp_path / "a.txt", "x")
    assert mode(tmp_path / "a.txt") == 0o666 & ~umask
    (tmp_path / "b").touch(0o600)
    fileio.as_new(tmp_path / "b")
    assert mode(tmp_path / "b") == 0o666 & ~umask
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("before", [0o600, 0o640, 0o644, 0o664])
def test_a_file_that_is_replaced_keeps_its_permissions(before: int, umask: int, tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.touch()
    target.chmod(before)
    fileio.write_text(target, "new")
    assert (mode(target), target.read_text()) == (before, "new")


def test_a_group_that_is_not_ours_to_give_is_not_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    target = tmp_path / "a.txt"
    target.touch()
    target.chmod(0o664)
    monkeypatch.setattr(os, "chown", refuse)
    fileio.write_text(target, "new")
    assert mode(target) == 0o604


def test_asked_permissions_go_before_those_of_an_older_file(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.touch(0o644)
    fileio.write_bytes(target, b"prompt", permissions=fileio.PRIVATE)
    assert mode(target) == 0o600


@pytest.mark.parametrize(
    ("permissions", "owner", "runs_as", "is_refused"),
    [
        (0o600, 7, 7, False),
        (0o400, 7, 7, False),
        (0o640, 7, 7, True),
        (0o604, 7, 7, True),
        (0o610, 7, 7, True),
        (0o440, 0, 7, False),  # as Kubernetes mounts it with fsGroup and defaultMode 0440
        (0o640, 0, 7, False),
        (0o644, 0, 7, True),
        (0o660, 0, 7, True),
        (0o640, 0, 0, True),
    ],
)
def test_a_secret_is_its_owners_or_given_to_a_group_by_root(
    permissions: int, owner: int, runs_as: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.stat_result((0o100000 | permissions, 1, 1, 1, owner, 5, 0, 0, 0, 0))
    monkeypatch.setattr(os, "stat", lambda path: found)
    monkeypatch.setattr(os, "geteuid", lambda: runs_as)
    if not is_refused:
        fileio.check_secret("key")
        return
    with pytest.raises(ConfigError, match="key can be read by others; run chmod 600 key"):
        fileio.check_secret("key")


def test_text_that_is_not_encodable_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        fileio.write_text(tmp_path / "a.txt", "\ud800")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_refused_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder; name a file inside it"):
        fileio.write_text(tmp_path, "x")


def test_a_missing_folder_is_refused_by_name_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; create it first"):
        fileio.write_text(tmp_path / "nowhere" / "a.txt", "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("locked", ["folder", "file"])
def test_a_place_without_permission_is_refused_before_the_work(
    locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    denied = tmp_path if locked == "folder" else target
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != denied)
    with pytest.raises(ConfigError, match="permission denied; choose another place"):
        fileio.check_writable(target)
    monkeypatch.undo()
    fileio.check_writable(target)
    fileio.check_writable(tmp_path / "new.txt")
    assert list(tmp_path.iterdir()) == [target]
