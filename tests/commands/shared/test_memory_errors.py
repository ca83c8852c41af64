"""Too little memory is one line and exit code 2, in whatever way a library tells it."""

import errno
import resource
import subprocess
import sys

import pytest

from kvq.cli import main
from kvq.commands.capacity import gpus
from kvq.commands.shared import memory_errors


def test_a_process_of_few_addresses_is_told_so():
    limit = (512 << 20, 512 << 20)
    done = subprocess.run(
        [sys.executable, "-m", "kvq", "gpus"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvq: error: memory is short: the process may have 512.0 MiB of addresses")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_libraries_that_lack_memory_end_a_command_in_one_line(error, monkeypatch, capsys):
    def fail(**_):
        raise RuntimeError("the layer is missing") from error

    monkeypatch.setattr(gpus.command, "callback", fail)
    with pytest.raises(SystemExit) as ended:
        main(["gpus"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("kvq: error: memory is short: ")


def test_riddles_are_taken_for_it_where_addresses_are_limited(monkeypatch):
    error = RuntimeError("FunctionParameter(): unknown parameter type: Tensor")
    monkeypatch.setattr(memory_errors, "address_limit", lambda: None)
    assert memory_errors.memory_message(error) is None
    monkeypatch.setattr(memory_errors, "address_limit", lambda: 3 << 30)
    assert "raise `ulimit -v`, which gives it 3.00 GiB" in memory_errors.memory_message(error)


def test_other_errors_are_let_be(monkeypatch):
    def fail(**_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(gpus.command, "callback", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["gpus"])
