"""A child that runs a program from stdin and can do little else; `sandbox.py` starts it.

Imports nothing but the standard library: it runs with `python -I`. What it runs can use no more processor
time and memory than its arguments say, start no process, reach no network, and change no file. That keeps
accidents of generated programs away from the machine; who means harm needs a virtual machine around.
"""

import ctypes
import os
import resource
import sys
from typing import Any

_FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.",
    "shutil.",
    "ctypes.",
    "signal.pthread_kill",
    "pty.",
    "tempfile.",
)
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def limit(cpu_s: int, memory_bytes: int) -> None:
    """Take away what the program doesn't need."""
    if sys.platform == "linux":  # where the kernel allows it, there is no network to reach
        ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: raise PermissionError for what a function under test has no reason to do."""
    if event == "open":
        mode, flags = args[1], args[2]
        writes = any(letter in "wax+" for letter in mode) if isinstance(mode, str) else flags & _WRITING
        if writes:
            raise PermissionError(f"programs write no files, this one opened {args[0]!r}")
    elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
        raise PermissionError(f"programs don't do {event}")


def main(mark: str, cpu_s: str, memory_bytes: str) -> None:
    """Run the program; `mark` is printed if it came to its end."""
    program = sys.stdin.read()
    answers = os.dup(sys.stdout.fileno())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    code = compile(program, "program", "exec")
    limit(int(cpu_s), int(memory_bytes))
    sys.addaudithook(refuse)
    exec(code, {"__name__": "__main__"})
    os.write(answers, mark.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
