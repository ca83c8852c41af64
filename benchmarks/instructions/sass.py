"""NVIDIA's machine code: the loop around the tensor cores, and its instructions by kind."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

KINDS = {  # by the longest beginning of a name that fits
    "tensor": "HMMA IMMA QMMA HGMMA IGMMA QGMMA WARPGROUP UTCHMMA UTCIMMA UTCQMMA",
    "copy": "LDGSTS LDGDEPBAR DEPBAR UTMA UBLKCP",
    "global": "LDG STG LD. ST. ATOM RED",
    "shared": "LDS STS ATOMS",
    "tensor memory": "LDTM STTM UTCBAR UTCCP UTCATOMSWS",
    "spill": "LDL STL",
    "constant": "LDC LDCU",
    "shuffle": "SHFL MOVM REDUX VOTE MATCH",
    "barrier": "BAR SYNCS WARPSYNC FENCE MEMBAR ERRBAR CCTL ELECT",
    "special": "MUFU",
    "fp32": "FFMA FMUL FADD FMNMX FSEL FSETP FSET FCHK",
    "convert": "F2F I2F F2I I2I F2FP HADD2.F32 FRND I2FP",
    "half2": "HFMA2 HMUL2 HADD2 HMNMX2 HSETP2 HSET2 VHMNMX",
    "bits": "PRMT LOP SHF SHL SHR BFE BMSK SGXT LEA IMAD.SHL FLO POPC",
    "multiply": "IMAD",
    "integer": "IADD ISETP IMNMX VIADD VIMNMX SEL IABS PLOP3 P2R R2P ISCADD",
    "uniform": "U R2UR VOTEU",
    "move": "MOV IMAD.MOV HFMA2.MMA.MOV CS2R S2R S2UR UMOV",
    "branch": "BRA BRX EXIT BSSY BSYNC BREAK BMOV NOP CALL RET YIELD NANOSLEEP",
}
_KIND_OF = {start: kind for kind, starts in KINDS.items() for start in starts.split()}
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<name>\S+)(?P<operands>[^;]*);")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_ENDS = ("EXIT", "RET", "BRX")  # nothing comes after them, unless they have a predicate
_ACCESS = ("LDG", "LDGSTS", "LDS", "LDSM")


class Instruction(NamedTuple):
    """One of a warp."""

    name: str  # with what qualifies it, as `LDG.E.128`
    target: str | None = None  # the label of a jump
    is_certain: bool = False  # what comes after it is reached by other jumps only


class Block(NamedTuple):
    """Instructions that run one after another, and the blocks that may come next."""

    instructions: list[Instruction]
    following: list[int]


def blocks(text: str) -> list[Block]:
    """Those of a kernel, in the order of its text."""
    parts: list[list[Instruction]] = [[]]
    starts: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if parts[-1]:
                parts.append([])
            starts[label[1]] = len(parts) - 1
        elif found := _LINE.match(line):
            parts[-1].append(_instruction(found))
            if parts[-1][-1].target or parts[-1][-1].is_certain:
                parts.append([])
    return [Block(part, _following(i, part, starts, len(parts))) for i, part in enumerate(parts)]


def _instruction(found: re.Match[str]) -> Instruction:
    name, operands = found["name"], found["operands"].strip()
    jump = _TARGET.search(operands)
    if name.startswith("BRA") or (name.startswith("CALL") and jump):  # far jumps of sm80 and sm89
        always = not found["predicate"] and re.fullmatch(r"`\(\S+\)", operands) is not None
        return Instruction(name, jump[1] if jump else None, always)
    return Instruction(name, None, not found["predicate"] and name.startswith(_ENDS))


def _following(index: int, part: list[Instruction], starts: dict[str, int], count: int) -> list[int]:
    last = part[-1] if part else Instruction("NOP")
    jump = [starts[last.target]] if last.target in starts else []
    return jump + ([] if last.is_certain or index + 1 == count else [index + 1])


def loops(code: list[Block]) -> list[set[int]]:
    """By their blocks' numbers: one that is always passed first, and all between it and a jump back to it."""
    before = _dominators(code)
    preceding: dict[int, list[int]] = {i: [] for i in range(len(code))}
    for i, block in enumerate(code):
        for j in block.following:
            preceding[j].append(i)
    found: dict[int, set[int]] = {}
    for end in sorted(before):
        for head in set(code[end].following) & before[end]:
            body, left = found.setdefault(head, {head}), [end]
            while left:
                i = left.pop()
                if i not in body and i in before:
                    body.add(i)
                    left += preceding[i]
    return list(found.values())


def _dominators(code: list[Block]) -> dict[int, set[int]]:
    """Of every block that is reached: those that are always passed before it, with itself."""
    found: dict[int, set[int]] = {0: {0}}
    changed = True
    while changed:
        changed = False
        for i in sorted(found):
            for j in code[i].following:
                new = ({j} | (found[i] & found[j])) if j in found else {j} | found[i]
                if j and found.get(j) != new:
                    found[j], changed = new, True
    return found


def tensor_loop(code: list[Block]) -> list[str]:
    """The names in the innermost loop that multiplies most on tensor cores; empty if none does."""
    return _names(code, _tensor_blocks(code))


def around(code: list[Block]) -> tuple[list[str], list[str]]:
    """The names before that loop and after it, on all sides of branches; what comes again is after it."""
    body, known = _tensor_blocks(code), _dominators(code)
    following = {i: set(code[i].following) for i in known}
    preceding = {i: {j for j in known if i in following[j]} for i in known}
    before, after = (_reached(body, edges) for edges in (preceding, following))
    return _names(code, before - after), _names(code, after)


def _reached(body: set[int], edges: dict[int, set[int]]) -> set[int]:
    """Blocks outside of `body` that edges lead to from it."""
    found: set[int] = set()
    left = [j for i in body for j in edges[i]]
    while left:
        i = left.pop()
        if i not in body and i not in found:
            found.add(i)
            left += edges[i]
    return found


def _tensor_blocks(code: list[Block]) -> set[int]:
    multiplying = [body for body in loops(code) if any(kind(x) == "tensor" for x in _names(code, body))]
    inner = [body for body in multiplying if not any(other < body for other in multiplying)]

    def size(body: set[int]) -> tuple[int, int]:
        own = _names(code, body)
        return sum(kind(x) == "tensor" for x in own), len(own)

    return max(inner, key=size, default=set())


def all_names(code: list[Block]) -> list[str]:
    """Of the whole kernel, but for what pads its end."""
    return _names(code, _dominators(code))


def _names(code: list[Block], numbers: Iterable[int]) -> list[str]:
    return [x.name for i in sorted(numbers) for x in code[i].instructions]


def kind(name: str) -> str:
    """Of an instruction; "other" if none is known."""
    fitting = (name[:n] for n in range(len(name), 0, -1) if name[:n] in _KIND_OF)
    return _KIND_OF[start] if (start := next(fitting, None)) else "other"


def kinds(names: list[str]) -> dict[str, int]:
    """How many there are of each, most first."""
    return dict(Counter(map(kind, names)).most_common())


def loads(names: list[str]) -> dict[str, int]:
    """Loads by the bytes that a lane asks for: `{"LDGSTS 16": 8}`."""
    found = Counter(f"{x.split('.')[0]} {_lane_bytes(x)}" for x in names if x.split(".")[0] in _ACCESS)
    return dict(sorted(found.items()))


def _lane_bytes(name: str) -> int:
    first, *parts = name.split(".")
    if first == "LDSM":
        return (
            4 * int(parts[-1]) if parts[-1].isdigit() else 4
        )  # matrices of 8 x 8 pairs of bytes, a warp each
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[part] for part in parts if part in widths), 4)
