"""Limits on a JSON body: values, names, depth and duplicate names, checked in slices before decoding.

Decoding and validating four million values would block the event loop for seconds. Invalid JSON is left to
the decoder, which stops at the first error; up to that point, scanner and decoder read the same values.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import msgspec

from kvq.server.http.loop_budget import Again

MAX_VALUES = 1 << 15  # per body, including field names
MAX_TOKEN_IDS = 1 << 18  # in the lists of `IDS_IN`, which are not counted as values
IDS_IN = (b"prompt", b"tokens", b"input")
MAX_KEYS = 4096  # per object
MAX_NAME = 1 << 20  # bytes
MAX_NESTING = 72  # strict_json.MAX_DEPTH for an arbitrary value, plus the levels around it
MAX_DIGITS = 64
MAX_EXPONENTS = 1024  # numbers with an exponent; those near a float's limits take 8 us each
_LEAST, _LARGEST = "-1.79e308", "1.79e308"  # limits of a float
_SLICE_S = 0.0005  # D313: half a millisecond, since 2 ms delayed tokens
_SHOWN = 40  # maximum length of a name in an error, in characters
_STEPS = 6  # maximum number of path components of a refused value
_TOKENS = 64  # between two clock readings
# Each pattern matches at most some ten thousand bytes at a time
_TOKEN = re.compile(rb'[\s,:]{0,4096}("[^"\\]{0,1024}"|[\[\]{}"]|[^"\[\]{},:\s]{1,%d})' % (MAX_DIGITS + 1))
_BETWEEN = re.compile(rb"[\s,:]{1,4096}")
_IDS = re.compile(rb"(?:\s{0,4}\d{1,20}\s{0,4},){1,2048}")
_ESCAPES = re.compile(rb'(?:\\.[^"\\]{0,64}){1,256}', re.DOTALL)


def scan(  # D312: values are counted before decoding
    body: bytes | bytearray, *, inside: int = 0, long: list[tuple[int, int]] | None = None
) -> Iterator[Again]:
    """Count the values of a body, in slices of half a millisecond.

    `inside`: number of objects that enclose the body, as in a line of a batch. `long` receives the positions,
    without quotes, of string values longer than 1 MiB.

    Raises:
        ValueError: a limit is exceeded.
    """
    began = perf_counter()
    for _ in _Scan(body, inside, [] if long is None else long).steps():
        if perf_counter() - began > _SLICE_S:
            yield Again.IN_TURN
            began = perf_counter()


@dataclass(slots=True)
class _Scan:
    body: bytes | bytearray
    inside: int
    long: list[tuple[int, int]]
    pos: int = 0
    num_values: int = 0
    num_ids: int = 0
    num_exponents: int = 0
    escape: int = 0  # position of the next escape, or of one before `pos`; -1: no more escapes
    has_ids: bool = False  # the current field of the body contains token ids
    entries: list[int] = field(default_factory=list)  # entries in each open list or object, including names
    names: list[set[bytes] | None] = field(default_factory=list)  # names in each open object; None for a list
    way: list[bytes] = field(default_factory=list)  # last name in each open list or object, quoted

    def steps(self) -> Iterator[None]:
        """Scan the body in small steps."""
        body, num_tokens = self.body, 0
        while self.pos < len(body):
            num_tokens += 1
            if num_tokens % _TOKENS == 0:
                yield
            if (found := _TOKEN.match(body, self.pos)) is None:
                if (between := _BETWEEN.match(body, self.pos)) is None:
                    return  # not JSON
                self.pos = between.end()
                yield
                continue
            self.pos = found.end()
            if (kind := body[self.pos - 1]) in b"]}":
                if self.entries:
                    self.entries.pop()
                    self.names.pop()
                    self.way.pop()
                continue
            self._count_value()
            if kind in b"[{":
                self._open(kind)
                if kind == ord("[") and self.has_ids:
                    yield from self._skip_ids()
            elif kind != ord('"'):
                self._count_number(found[1])
                continue
            elif found[1] == b'"':  # only the quote: the string is long or has escapes
                yield from self._skip_string()
            if self.entries and self.entries[-1] % 2 == 1 and (names := self.names[-1]) is not None:
                self._take_name(bytes(memoryview(body)[found.start(1) : self.pos]), names)

    def _count_value(self) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ValueError(f"it may have {MAX_VALUES} values")
        if self.entries:
            self.entries[-1] += 1
            if self.entries[-1] > 2 * MAX_KEYS and self.names[-1] is not None:
                raise ValueError(f"an object may have {MAX_KEYS} fields")

    def _open(self, kind: int) -> None:
        if len(self.entries) == MAX_NESTING + self.inside:
            raise ValueError(f"it may be nested {MAX_NESTING} levels deep")
        self.entries.append(0)
        self.names.append(set() if kind == ord("{") else None)
        self.way.append(b"")

    def _take_name(self, name: bytes, names: set[bytes]) -> None:  # D318
        """Record a field name; `name` is its JSON source, including the quotes."""
        if len(name) > MAX_NAME:
            raise ValueError(f"the name of a field may have {MAX_NAME} bytes")
        if b"\\" in name:
            with contextlib.suppress(msgspec.MsgspecError):  # the decoder will say what is wrong with it
                name = msgspec.json.encode(msgspec.json.decode(name, type=str))
        if name in names:
            raise ValueError(f"the name {_shown(name)} is twice in one object")
        names.add(name)
        self.way[-1] = name
        if len(self.entries) == 1 + self.inside:
            self.has_ids = name[1:-1] in IDS_IN

    def _count_number(self, number: bytes | bytearray) -> None:
        if len(number) > MAX_DIGITS:
            raise ValueError(f"a number may have {MAX_DIGITS} digits")
        if number[:1] not in b"-0123456789" or b"e" not in number.lower():
            return
        self.num_exponents += 1
        if self.num_exponents > MAX_EXPONENTS:
            raise ValueError(f"it may have {MAX_EXPONENTS} numbers with exponents")
        try:
            value = float(number)
        except ValueError:
            return  # the decoder will say what is wrong with it
        if math.isinf(value):
            where = ".".join(_shown(name) for name in [name for name in self.way if name][:_STEPS])
            raise ValueError(
                f"{where or 'a value'} is {number.decode()}; numbers may be {_LEAST} to {_LARGEST}"
            )

    def _skip_ids(self) -> Iterator[None]:
        while (ids := _IDS.match(self.body, self.pos)) is not None:
            self.num_ids += self.body.count(b",", self.pos, ids.end())
            self.pos = ids.end()
            if self.num_ids > MAX_TOKEN_IDS:
                raise ValueError(f"it may have {MAX_TOKEN_IDS} token ids; give the text instead")
            yield

    def _skip_string(self) -> Iterator[None]:
        body, start, end = self.body, self.pos, self.body.find(b'"', self.pos)
        while end >= 0:
            if 0 <= self.escape < self.pos:
                self.escape = body.find(b"\\", self.pos)
            if not 0 <= self.escape < end or (found := _ESCAPES.match(body, self.escape)) is None:
                break
            self.pos = found.end()
            if end < self.pos:
                end = body.find(b'"', self.pos)
            yield
        self.pos = end + 1 if end >= 0 else len(body)
        if end - start > MAX_NAME:
            self.long.append((start, end))


def _shown(name: bytes) -> str:
    """Return a quoted name in the form shown in errors."""
    return f"{name[1:-1].decode(errors='replace'):.{_SHOWN}}"
