"""Result files are whole or absent."""

import os
from pathlib import Path

import pytest

from kvq import fileio
from kvq.errors import ConfigError


def test_text_is_written_as_utf8_readable_and_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old and longer than what comes")
    fileio.write_text(target, "\u00fc 4.5 bits\n")
    assert target.read_bytes() == b"\xc3\xbc 4.5 bits\n"
    assert target.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("failing", ["replace", "chmod", "fdopen"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_a_failure_at_any_step_keeps_the_old_file_and_leaves_nothing_beside_it(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    real_fdopen = os.fdopen

    def fail(*args: object, **kwargs: object) -> None:
        if failing == "fdopen":
            real_fdopen(args[0], "w").close()
        raise error

    monkeypatch.setattr(os, failing, fail)
    expected = ConfigError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        fileio.write_text(target, "new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


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
