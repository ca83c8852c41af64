"""Long work is heard from where standard error is no terminal, and short work is not."""

import logging
import re
import threading

import pytest

from kvq.commands.shared import progress
from kvq.commands.shared.progress import _PlainLines, named_progress, progress_bar, status
from tests.waiting import wait_for


@pytest.fixture
def lines(monkeypatch):
    """What is said, as it is said."""
    said = []
    monkeypatch.setattr(progress, "echo", lambda line, err: said.append(line) if err else pytest.fail(line))
    return said


@pytest.fixture
def soon(monkeypatch):
    """All work is long."""
    monkeypatch.setattr(progress, "FIRST_S", 0.001)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)


def heard(lines, pattern):
    wait_for(lambda: any(re.fullmatch(pattern, line) for line in lines.copy()), lambda: f"{pattern}: {lines}")


def test_the_share_that_is_done_and_the_time_left_are_said(lines, soon):
    with progress_bar("measuring") as update:
        heard(lines, r"kvq: measuring, \d+ s so far")
        update(12, None)
        heard(lines, r"kvq: measuring, 12 done, \d+ s so far")
        update(0, 1200)
        heard(lines, r"kvq: measuring: 0% done \(0 of 1,200\) in \d+ s, time left not known yet")
        update(900, 1200)
        heard(lines, r"kvq: measuring: 75% done \(900 of 1,200\) in \d+ s, about \d+ s left")
    assert re.fullmatch(r"kvq: measuring: done in \d+ s", lines[-1])


def test_short_work_says_nothing(lines):
    with progress_bar("measuring") as update:
        update(1, 2)
    with status("loading tiny"):
        pass
    assert lines == []


def test_work_that_fails_is_not_done(lines, soon):
    with pytest.raises(RuntimeError), progress_bar("measuring"):  # noqa: PT012
        heard(lines, r"kvq: measuring, \d+ s so far")
        raise RuntimeError
    assert not any("done in" in line for line in lines)


def test_stages_of_what_has_no_length_are_said(lines, soon):
    with status("loading tiny"):
        heard(lines, r"kvq: loading tiny, \d+ s so far")
        logging.getLogger("kvq").info("reading weights")
        heard(lines, r"kvq: loading tiny: .*reading weights, \d+ s so far")
    assert lines, "said while it went on"


def test_every_step_of_several_is_named(lines, soon):
    with named_progress() as update:
        update("calibrating", 1, 2)
        heard(lines, r"kvq: calibrating: 50% done .*")
        update("searching", 1, 4)
        heard(lines, r"kvq: searching: 25% done .*")
    assert [re.sub(r"\d+ s", "", line) for line in lines if "done in" in line] == [
        "kvq: calibrating: done in ",
        "kvq: searching: done in ",
    ]


def test_lines_grow_rarer(lines, monkeypatch):
    waits = []

    class Ended(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return len(waits) > 3

    monkeypatch.setattr(threading, "Event", Ended)
    elapsed_s = iter([5, 5, 35, 35, 600, 600, 600])
    monkeypatch.setattr(_PlainLines, "_elapsed_s", property(lambda self: next(elapsed_s)))
    _PlainLines("tuning")._run()
    assert waits == [5, 30, 30, 60]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7320, "2 h 2 min")],
)
def test_times_are_said_to_two_units(seconds, words):
    assert progress._span(seconds) == words


def test_pipes_get_no_escape_codes(kvq, tmp_path, soon):
    status, out, err = kvq("perplexity", "--kv", "int8", "--context", 80, "--max-windows", 2)
    assert status == 0
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert re.search(r"^kvq: loading .*: done in \d+ s$", err, re.MULTILINE)
    assert re.search(r"^kvq: measuring: done in \d+ s$", err, re.MULTILINE)
