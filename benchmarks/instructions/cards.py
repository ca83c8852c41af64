"""What multiprocessors hold, and the instructions that a card can issue while its memory delivers a key.

Sources: NVIDIA's CUDA C++ Programming Guide, technical specifications per compute capability, and the white
papers of the A100, Ada and H100. A clock is the one that the data sheet's dense FP16 rate stands for; an H100
or H200 may run at up to 1.98 GHz, and has 8% more slots then.
"""

from dataclasses import dataclass

from kvq.capacity.plan.gpus import known_gpus

SCHEDULERS = 4  # of a multiprocessor; each issues an instruction of a warp in a clock
_REGISTERS = 65_536  # of a multiprocessor, a quarter at each scheduler
_REGISTERS_AT_ONCE = 256  # given to a warp
_SHARED_AT_ONCE = 128  # bytes given to a program
_OWN_SHARED = 1024  # bytes that the system keeps of every program


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiprocessor:
    """What programs share."""

    shared: int  # bytes
    warps: int
    programs: int

    def programs_at_once(self, *, warps: int, registers: int, shared: int) -> int:
        """How many fit of `warps` warps, with so many registers a thread and bytes of shared memory."""
        a_warp = _rounded_up(32 * registers, _REGISTERS_AT_ONCE)
        held = SCHEDULERS * (_REGISTERS // SCHEDULERS // a_warp)
        own = _rounded_up(shared + _OWN_SHARED, _SHARED_AT_ONCE)
        return min(held // warps, self.warps // warps, self.shared // own, self.programs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A GPU, by its name in the table of GPUs that plans are made with."""

    name: str
    device: str
    multiprocessors: int
    clock_ghz: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second, of the data sheet."""
        return known_gpus()[self.name].bandwidth

    def slots(self, size: float) -> float:
        """Instructions of a warp that all schedulers can issue while memory delivers `size` bytes."""
        return SCHEDULERS * self.multiprocessors * self.clock_ghz * 1e9 * size / self.bandwidth


MULTIPROCESSORS = {
    "sm80": Multiprocessor(shared=164 * 1024, warps=64, programs=32),
    "sm86": Multiprocessor(shared=100 * 1024, warps=48, programs=16),
    "sm89": Multiprocessor(shared=100 * 1024, warps=48, programs=24),
    "sm90": Multiprocessor(shared=228 * 1024, warps=64, programs=32),
    "sm100": Multiprocessor(shared=228 * 1024, warps=64, programs=32),
}
CARDS = (
    Card(name="a100-80", device="sm80", multiprocessors=108, clock_ghz=1.41),
    Card(name="rtx-4090", device="sm89", multiprocessors=128, clock_ghz=2.52),
    Card(name="h100", device="sm90", multiprocessors=132, clock_ghz=1.83),
    Card(name="h200", device="sm90", multiprocessors=132, clock_ghz=1.83),
    Card(name="b200", device="sm100", multiprocessors=148, clock_ghz=1.86),
)


def slots(device: str, key_bytes: float) -> dict[str, float]:
    """Of every card of that kind, for a key of one KV head."""
    return {card.name: round(card.slots(key_bytes), 1) for card in CARDS if card.device == device}


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
