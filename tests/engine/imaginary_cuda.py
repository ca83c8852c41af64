"""What torch.cuda tells and does where a GPU isn't there: streams, events and graphs that are noted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: str
    grid: tuple[int, ...]


@dataclass(eq=False)
class Stream:
    """A stream as torch.cuda has them."""

    device: torch.device
    name: str = "a stream"
    waits_for: list["Stream"] = field(default_factory=list)

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other)


@dataclass(eq=False)
class ImaginaryGPU:
    """What was done on it. `waits`: called with what the host waits for, each time that it does."""

    device: torch.device
    launches: list[Launch] = field(default_factory=list)
    made: list[tuple[str, torch.device]] = field(default_factory=list)  # streams, events and captures
    streams: dict[torch.device, Stream] = field(default_factory=dict)  # the current one of each device
    current: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    kept: WeakSet[Any] = field(default_factory=WeakSet)  # graphs and their pools that somebody holds
    pinned: dict[int, Tensor] = field(default_factory=dict)  # by address, and kept: addresses stay theirs
    waits: list[Callable[[str], None]] = field(default_factory=list)

    def wait(self, what: str) -> None:
        for told in self.waits:
            told(what)

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self.pinned

    def pin(self, host: Tensor) -> Tensor:
        self.pinned[host.untyped_storage().data_ptr()] = host
        return host

    def current_stream(self, device: Any = None) -> Stream:
        where = self.current if device is None else whole(device)
        return self.streams.setdefault(where, Stream(where, "the default stream"))


def whole(device: Any) -> torch.device:
    """The device with its index; the first one without."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device(device)
    return found if found.index is not None else torch.device(found.type, 0)


def cuda_of(gpu: ImaginaryGPU) -> dict[str, Any]:
    """What takes the place of torch.cuda's own."""

    class NewStream(Stream):
        def __init__(self, device: Any = None) -> None:
            super().__init__(gpu.current if device is None else whole(device))
            gpu.made.append(("stream", self.device))

        def synchronize(self) -> None:
            gpu.wait("a stream")

    class Event:
        def __init__(self, **_: Any) -> None:
            self.recorded: Stream | None = None

        def record(self, stream: Stream | None = None) -> None:
            self.recorded = stream or gpu.current_stream()
            gpu.made.append(("event", self.recorded.device))

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            gpu.wait("an event")

    class CUDAGraph:
        def __init__(self) -> None:
            self.pool: object = None
            self.device: torch.device | None = None
            gpu.kept.add(self)

        def capture_begin(self, pool: object = None, **_: Any) -> None:
            self.pool, self.device = pool, gpu.current
            gpu.made.append(("graph", self.device))

        def capture_end(self) -> None:
            assert gpu.current == self.device, "a capture ends on the device that it began on"

        def replay(self) -> None:
            gpu.launches.append(Launch("a graph", ()))

    class Pool:
        def __init__(self) -> None:
            gpu.kept.add(self)

    class Current:
        def __init__(self, device: Any) -> None:
            self._device = whole(device)

        def __enter__(self) -> None:
            self._outside, gpu.current = gpu.current, self._device

        def __exit__(self, *_: object) -> None:
            gpu.current = self._outside

    class OnStream(Current):
        def __init__(self, entered: Stream) -> None:
            super().__init__(entered.device)
            self._entered = entered

        def __enter__(self) -> None:
            super().__enter__()
            self._before = gpu.current_stream()
            gpu.streams[self._device] = self._entered

        def __exit__(self, *_: object) -> None:
            gpu.streams[self._device] = self._before
            super().__exit__()

    memory = 80 << 30
    told = SimpleNamespace(
        Stream=NewStream,
        Event=Event,
        CUDAGraph=CUDAGraph,
        graph=_graph_of(OnStream),
        device=Current,
        stream=OnStream,
        current_stream=gpu.current_stream,
        current_device=lambda: gpu.current.index,
        graph_pool_handle=Pool,
        synchronize=lambda _=None: gpu.wait("the device"),
        empty_cache=lambda: None,
        get_device_name=lambda _=None: "an imaginary GPU",
        get_device_capability=lambda _=None: (9, 0),
        get_device_properties=lambda _=None: SimpleNamespace(multi_processor_count=132, total_memory=memory),
        mem_get_info=lambda _=None: (memory, memory),
        memory_allocated=lambda _=None: 0,
        memory_reserved=lambda _=None: 0,
        max_memory_allocated=lambda _=None: 0,
        reset_peak_memory_stats=lambda _=None: None,
    )
    return vars(told)


def _graph_of(on_stream: Callable[[Stream], Any]) -> type:
    class Graph:
        """torch.cuda.graph, which stays on its stream where the end of a capture raises."""

        def __init__(self, graph: Any, pool: object = None, stream: Any = None, **_: Any) -> None:
            assert stream is not None, "without one it takes a stream of whatever device was current first"
            self._graph, self._pool, self._stream = graph, pool, stream

        def __enter__(self) -> None:
            self._on = on_stream(self._stream)
            self._on.__enter__()
            self._graph.capture_begin(self._pool)

        def __exit__(self, *raised: object) -> None:
            self._graph.capture_end()
            self._on.__exit__()

    return Graph
