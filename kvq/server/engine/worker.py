"""Engine process: `python -m kvq.server.engine.worker FD`, where FD is one end of a socket pair."""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from array import array
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec

from kvq import errors
from kvq.engine import Piece
from kvq.engine.build import build
from kvq.engine.loop import EngineLoop
from kvq.engine.requests.outputs import Event
from kvq.engine.requests.request_state import Job
from kvq.engine.steps.core import EngineCore
from kvq.errors import ConfigError, KVQError
from kvq.layout import GroupLayout
from kvq.lazy import unseen
from kvq.scheduler import Snapshot
from kvq.server.engine import messages
from kvq.server.engine.formats import make_cores
from kvq.server.engine.frames import encode, read, to_engine
from kvq.server.engine.introspection import Introspection
from kvq.server.engine.memory import Memory
from kvq.server.engine.messages import Ended, Start
from kvq.server.engine.residency import Residency
from kvq.server.kv_events.config import EventsConfig
from kvq.server.kv_events.stream import EventStream
from kvq.server.logs import configure

_log = logging.getLogger("kvq")
_SWITCH_S = 5e-4  # maximum wait of a step for Python code of other threads; Python's default is 5 ms
STUCK = 70  # exit status after a step that never ended


class _Worker:
    """Main loop of the engine process: runs steps and sends their results until the HTTP process ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._pieces: list[Piece] = []
        self._ended: list[Ended] = []
        self._generated = 0
        self._residency = Residency()
        self._introspection = Introspection()
        self._is_looked_at = False  # a snapshot was requested since the last snapshot
        self._events: EventStream | None = None  # sends KV events to routers
        self._cores: dict[str, EngineCore] = {}  # by KV format
        self._counts: Counter[str] = Counter()  # requests, by KV format
        self._safer: str | None = None  # format of new requests after an alert of the guard
        self._has_fallen_back = False
        self._looked = 0  # requests that the guard had compared when results were last sent

    def run(self) -> None:
        start = read(self._sock, to_engine)
        if not isinstance(start, Start):
            return
        logs = configure(start.log)
        try:
            self._run(start)
        finally:
            logs.stop()

    def _run(self, start: Start) -> None:
        try:
            with unseen("scipy"):  # transformers imports scipy for losses: half a second and 40 MB
                import transformers  # noqa: F401
            model, config = build(Path(start.folder), start.kv, start.options)
            cores = make_cores(model, config, start)
        except Exception as error:  # noqa: BLE001 - another try would fail in the same way
            if isinstance(error, KVQError):
                reason = str(error)
            else:
                reason = f"the engine can't be built: {type(error).__name__}: {errors.first_lines(error)}"
                _log.error("the engine can't be built", exc_info=error)
            may_pass = isinstance(error, errors.OutOfMemory | MemoryError | OSError)
            breaks = isinstance(error, errors.BrokenFormat)
            self._send(messages.Refused(reason=reason, may_pass=may_pass, breaks_model=breaks))
            return
        core, *others = cores.values()
        self._cores, self._safer = cores, start.guard_fallback
        self._has_fallen_back = start.has_fallen_back
        loop = EngineLoop(core, lambda _: os._exit(STUCK), others)
        if core.handover is not None:
            core.handover.wake = loop.wake
        core.scheduler.manager.subscribe(self._residency)
        if start.kv_events is not None:
            try:
                self._publish(loop, start.kv_events)
            except ConfigError as error:
                self._send(messages.Refused(reason=str(error), may_pass=True))
                for one in cores.values():
                    one.close()
                return
        memory = Memory(model.weights.device)
        gc.collect()
        gc.freeze()  # so that collecting the cycles of requests does not scan all objects of the libraries
        threading.Thread(target=self._listen, args=(loop,), name="kvq-listen", daemon=True).start()
        layout = model.layout
        self._send(
            messages.Ready(
                model_digest=model.weights.digest,
                vocab_size=model.geometry.vocab_size,
                block_bytes=[group.block_bytes for group in layout.groups],
                kv=[_formats(group) for group in layout.groups],
                shape=core.scheduler.shape,
                scheduler=core.scheduler.config,
                is_staging=[group.is_staging for group in layout.groups],
                others={name: one.scheduler.shape for name, one in cores.items() if one is not core},
            )
        )
        try:
            self._serve(loop, memory)
        finally:
            if self._events is not None:
                self._events.close()
            for one in cores.values():
                one.close()
            loop.watchdog.close()

    def _serve(self, loop: EngineLoop, memory: Memory) -> None:
        core = loop.core
        self._tell(core, memory)
        while loop.obey(timeout_s=memory.left_s):  # the wait ends when freed memory is due to be returned
            ran = loop.has_work and loop.step()
            if self._events is not None:
                self._events.flush()
            if self._has_news(core) or ran or self._pieces or self._ended:
                self._tell(core, memory)
            if self._is_looked_at:
                self._is_looked_at = False
                self._send(self._introspection.look(core, self._jobs))
            memory.tend()

    def _publish(self, loop: EngineLoop, config: EventsConfig) -> None:
        """Start publishing block events to routers, and report all blocks to every new subscriber."""
        from kvq.server.kv_events.publisher import Publisher  # imports pyzmq, needed only here

        manager = loop.core.scheduler.manager

        def joined() -> None:
            if self._events is not None:
                loop.ask(self._events.tell_all)

        publisher = Publisher(config, block_size=manager.block_size, on_join=joined)
        self._events = EventStream(manager, publisher.put)
        self._events.flush()

    def _do(
        self,
        core: EngineCore,
        message: messages.Submit | messages.Hint | messages.ChangeAdapter | int | str,
        came_s: float,
    ) -> None:
        """Handle a message from the HTTP process between two steps."""
        if isinstance(message, messages.Submit):
            self._submit(core, message, came_s)
        elif isinstance(message, messages.Hint):
            for one in self._cores.values():
                one.sessions.hint(message.tenant, message.session, message.action, message.seconds)
        elif isinstance(message, messages.ChangeAdapter):
            self._change_adapter(core, message)
        elif message == "look":
            self._is_looked_at = True
        elif message == "drain":
            if core.handover is not None:
                core.handover.move_requests()
        elif message in self._jobs:
            for one in self._cores.values():
                one.cancel(self._jobs[message])  # does nothing where it doesn't run

    def _change_adapter(self, core: EngineCore, message: messages.ChangeAdapter) -> None:
        error = None
        try:
            if message.folder is None:
                core.adapters.unload(message.name)
            else:
                core.adapters.load(message.name, message.folder)
        except (KVQError, MemoryError) as refused:
            error = str(refused)
        self._send(messages.AdapterChanged(name=message.name, error=error))

    def _submit(self, core: EngineCore, command: messages.Submit, came_s: float) -> None:
        number, kv = command.number, command.options.kv_format
        options = replace(command.options, request_id=str(number), kv_format=None)
        names = [next(iter(self._cores), "")] if kv is None else [kv]
        if kv is None and self._has_fallen_back:
            names.insert(0, self._safer or "")  # what is too long for its pools stays in the default
        try:
            prompt = messages.unpack(command.prompt)
            for name in names:
                core = self._cores.get(name, core)
                with nullcontext() if name == names[-1] else suppress(errors.RequestError):
                    job = core.intake.new_job(prompt, options, listener=partial(self._take, number, name))
                    break
            self._counts[name] += 1
            self._jobs[number] = job
            self._introspection.meet(options.tenant)
            if self._events is not None:
                self._events.include(options.tenant)
            core.submit(job, arrival_s=came_s)
        except KVQError as error:
            self._jobs.pop(number, None)
            self._ended.append(Ended(number=number).failed(error))

    def _take(self, number: int, kv: str, event: Event) -> None:
        if isinstance(event, Piece):
            self._generated += len(event.token_ids)
            self._pieces.append(event)
            return
        job = self._jobs.pop(number, None)
        self._introspection.ended(number, None if job is None else job.tenant, event)
        ended = Ended(
            number=number,
            kv_format=kv if len(self._cores) > 1 else None,
            receipt=event.receipt,
            timing=replace(event.timing, itl_s=[]),
            prompt_logprobs=event.prompt_logprobs,
            vector=array("f", event.vector or ()).tobytes(),
        )
        self._ended.append(ended if event.error is None else ended.failed(event.error))

    def _tell(self, core: EngineCore, memory: Memory) -> None:
        """Send the results of a step in one message."""
        manager = core.scheduler.manager
        guard = core.upkeep.guard
        if guard is not None:
            self._looked = guard.totals.requests + guard.totals.failed
        gauges = messages.Gauges(
            **self._snapshot(core).known(),
            generated_tokens=self._generated,
            evictions=self._residency.evictions,
            pinned=[manager.pins.num_pinned(group) for group in range(len(manager.pools))],
            refused_pins=core.pinning.num_refused,
            kv_events=0 if self._events is None else self._events.sent,
            dropped_kv_events=0 if self._events is None else self._events.dropped,
            packed_blocks=manager.blocks.ladder.num_packed,
            prefetched_sessions=core.sessions.num_prefetched,
            **({} if manager.blocks.tiers is None else manager.blocks.tiers.gauges()),
            **({} if guard is None else guard.gauges()),
            guard_fallback=int(self._has_fallen_back),
            formats=self._formats() if len(self._cores) > 1 else {},
            memory=memory.look(),
        )
        stepped = messages.Stepped(
            pieces=self._pieces,
            ended=self._ended,
            gauges=gauges,
            itl_s=self._introspection.take_gaps_s(self._jobs),
            block_times=self._residency.take(),
        )
        self._pieces, self._ended = [], []
        try:
            self._send(stepped)
        except (
            errors.EngineError
        ) as error:  # frame too large: only a long prompt's log-probabilities need so much
            wrong = errors.RequestError(f"the prompt's log-probabilities can't be sent: {error}")
            ended = [
                one if one.prompt_logprobs is None else Ended(number=one.number).failed(wrong)
                for one in stepped.ended
            ]
            self._send(msgspec.structs.replace(stepped, ended=ended))

    def _has_news(self, core: EngineCore) -> bool:
        """Return True if the guard found something while no step ran; after its first alert, fall back."""
        if (guard := core.upkeep.guard) is None:
            return False
        if guard.totals.alerts and self._safer is not None and not self._has_fallen_back:
            self._has_fallen_back = True
            _log.error("new requests get KV in %s from now on, as --guard-fallback says", self._safer)
        return self._looked != guard.totals.requests + guard.totals.failed

    def _snapshot(self, core: EngineCore) -> Snapshot:
        """Return the counts of all engines, with the pools of `core`."""
        total = core.scheduler.snapshot()
        others = [other.scheduler.snapshot() for other in self._cores.values() if other is not core]
        counts = {
            one.name: sum((getattr(other, one.name) for other in others), getattr(total, one.name))
            for one in fields(Snapshot)
            if one.name not in ("misses", "pools")
        }
        return replace(total, **counts)

    def _formats(self) -> dict[str, dict[str, int]]:
        found = {}
        for name, core in self._cores.items():
            usage, groups = core.scheduler.manager.usage(), core.model.layout.groups
            pools = [pool for pool, group in zip(usage, groups, strict=True) if not group.is_staging]
            found[name] = {
                "requests": self._counts[name],  # since the start
                "running": len(core.scheduler.running.requests),
                "waiting": core.scheduler.waiting.num_waiting,
                "live": sum(pool.live for pool in pools),
                "blocks": sum(pool.total for pool in pools),
            }
        return found

    def _listen(self, loop: EngineLoop) -> None:  # D295: a thread, since steps may take seconds
        """Read messages from the HTTP process in a thread, so that pings are answered during steps."""
        try:
            while (message := read(self._sock, to_engine)) is not None:
                if message == "ping":
                    self._send(message)
                elif not isinstance(message, Start):
                    loop.ask(partial(self._do, loop.core, message, perf_counter()))
        except ConnectionError:  # the HTTP process has ended
            pass
        except (OSError, KVQError):
            _log.exception("the HTTP process can't be understood")
        loop.ask(None)

    def _send(self, message: messages.FromEngine) -> None:
        with self._sending:
            self._sock.sendall(encode(message))


def _formats(group: GroupLayout) -> str:
    """Return the full names of a layer group's formats, joined by + if the layers have different formats."""
    pairs = [(layer.formats.k.name, layer.formats.v.name) for layer in group.layers]
    return "+".join(dict.fromkeys(k if k == v else f"{k}/{v}" for k, v in pairs))


def main() -> None:
    """Run the worker until the other end of the socket is closed."""
    sys.setswitchinterval(_SWITCH_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process handles Ctrl-C and ends this one
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # its log may go to a terminal of another process group
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        try:
            _Worker(sock).run()
        except BrokenPipeError:
            _log.warning("the HTTP process is gone")
    os._exit(0)  # everything is closed; unloading torch would take a second of processor time


if __name__ == "__main__":
    main()
