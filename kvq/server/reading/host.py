"""Host process that readers are forked from: `python -m kvq.server.reading.host FD`.

The host loads the tokenizer once. For each `FORK` message with a descriptor, it forks a reader that serves
the descriptor, and replies with the reader's process id. For a message with a reader's id, it ends the reader
and replies with the exit status. When the other end of the socket is closed, it ends all readers and exits.
"""

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from kvq.engine.grammar.worker import limit_memory
from kvq.errors import KVQError, RequestError
from kvq.models.loading.tokenizer import load_without_torch
from kvq.models.run.prompts import PromptEncoder, UnfitPrompt
from kvq.server.engine.frames import Decoder, encode, read
from kvq.server.reading.jobs import Job, JobResult, Setup, ToReader, put_together

ID_BYTES = 4  # size of a process id or an exit status
NO_MEMORY = 1  # exit status of a reader that ran out of memory
FORK = bytes(ID_BYTES)  # sent in place of a reader's id


def main() -> None:  # D289: a thread can't be killed; a forked reader can
    """Load the tokenizer, then fork and end readers until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the HTTP process, which then ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads don't outlive a fork
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        setup = read(sock, Decoder(Setup))
        if setup is None:
            return
        try:
            encoder = _load(setup)
        except KVQError as error:
            sock.sendall(encode(JobResult(refusal=str(error))))
            return
        sock.sendall(encode(JobResult()))
        _host(sock, encoder, setup.memory_bytes)


def _load(setup: Setup) -> PromptEncoder:
    tokenizer = load_without_torch(Path(setup.folder), setup.chat_template)
    encoder = PromptEncoder(tokenizer, trusts_chats=setup.trusts_chats)
    encoder.warm_up()
    gc.collect()
    gc.freeze()  # pages that are never written stay shared with the forked readers
    return encoder


def _host(sock: socket.socket, encoder: PromptEncoder, memory_bytes: int) -> None:
    readers: set[int] = set()
    try:
        while True:
            asked, descriptors, _, _ = socket.recv_fds(sock, ID_BYTES, 1)
            if len(asked) < ID_BYTES:
                return
            if asked == FORK:
                reader = os.fork()
                if reader == 0:
                    sock.close()
                    read_jobs(descriptors[0], encoder, memory_bytes)
                os.close(descriptors[0])
                readers.add(reader)
                answer = reader
            else:
                reader = int.from_bytes(asked, "little")
                answer = _end(reader) if reader in readers else 0
                readers.discard(reader)
            sock.sendall(answer.to_bytes(ID_BYTES, "little", signed=True))
    except OSError:  # the other end is closed
        return
    finally:
        for reader in readers:
            os.kill(reader, signal.SIGKILL)


def _end(reader: int) -> int:
    """End a reader and return its exit status; a negative status is the negated signal number."""
    os.kill(reader, signal.SIGKILL)  # a reader that has exited keeps its id until `waitpid`
    return os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])


def read_jobs(descriptor: int, encoder: PromptEncoder, memory_bytes: int) -> NoReturn:
    """Run jobs from a socket until the socket is closed, then exit this process (a fork of the host)."""
    try:
        decoder: Decoder[ToReader] = Decoder(ToReader)
        with socket.socket(fileno=descriptor) as sock:
            pieces: list[str] = []
            while (job := read(sock, decoder)) is not None:
                if isinstance(job, str):
                    pieces.append(job)
                    continue
                # Processor time, since a busy machine is not the job's fault. The signal kills the process.
                signal.setitimer(signal.ITIMER_PROF, job.processor_s)
                limit_memory(memory_bytes)
                answer = encode(_answer(encoder, job, pieces))
                pieces.clear()
                signal.setitimer(signal.ITIMER_PROF, 0)
                sock.sendall(answer)
    except OSError:
        pass
    finally:
        os._exit(0)


def _answer(encoder: PromptEncoder, job: Job, pieces: list[str]) -> JobResult:
    try:
        return put_together(job, pieces).do(encoder)
    except RequestError as error:
        return JobResult(
            refusal=str(error),
            is_too_long=isinstance(error, UnfitPrompt) and not error.fails,
            template_fails=isinstance(error, UnfitPrompt) and error.fails,
        )
    except MemoryError:  # treated as a crash, as it would be inside other libraries
        os._exit(NO_MEMORY)
    except Exception as error:  # noqa: BLE001 - fails only this job; its message may quote a prompt
        return JobResult(refusal=f"the tokenizer failed: {type(error).__name__}", has_failed=True)


if __name__ == "__main__":
    main()
