"""Trials of the folder of segments alone, without a model.

    python -m benchmarks.tiers.disk [--parts kills,flips,damage,budget] [--scale 0.1] [--seed 1]

kills: 100 times a process that writes to a folder is killed with SIGKILL in the middle of it, while another
one reads and writes there; after each, the folder is opened anew. flips: 10,000 times one bit of a folder is
flipped, one half with an encrypted one. damage: files cut, zeroed, exchanged, copied and overwritten. budget:
two processes share a folder that is sampled while they write. Every block that is read is compared with what
was written. `--scale` shortens counts. Results go to benchmarks/results/tiers-<part>-cpu.json with --write.
"""

import argparse
import atexit
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvq
from benchmarks.findings import RESULTS, Rows, finding, report
from benchmarks.tiers.contents import Made, a_tier, folder_bytes, make_key, read_all, sealing_of
from kvq.tiers.segment import SUFFIX

_AT_A_BOUNDARY = ("deleted", "cut", "left out")  # kinds that may leave folders that could have been written
_APART = 1_000_000  # numbers of one writer


class Writer:
    """A process that writes to a folder, and the last line that it said."""

    def __init__(self, **settings: Any) -> None:
        """Start it and wait until it has opened the folder."""
        command = [sys.executable, "-c", _child(), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.first = settings["first"]
        assert self._process.stdout is not None, "it is a pipe"
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(self._process.communicate()[1])
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        self.lines += self._process.stdout

    def kill(self) -> int:
        """Kill it, and return how many blocks it had written for certain."""
        self._process.kill()
        return self._ended()

    def wait(self) -> int:
        """Wait until it has written all."""
        return self._ended()

    def _ended(self) -> int:
        if self._process.stderr is None or self._process.stderr.closed:
            return 0
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None, "it is a pipe"
        self.said = self._process.stderr.read()
        self._process.stderr.close()
        if "wrong" in self.said or "Traceback" in self.said:
            raise SystemExit(self.said)
        whole = [line for line in self.lines if line.endswith("\n")]
        return int(whole[-1].split()[0]) if whole else 0


def _child() -> str:
    """Return a program that runs the writer with this process's kvq, wherever that is."""
    kvq_root, own_root = Path(kvq.__file__).parents[1], Path(__file__).parents[2]
    return (
        f"import sys; sys.path.insert(0, {str(kvq_root)!r}); import kvq; "
        f"sys.path.insert(0, {str(own_root)!r}); from benchmarks.tiers.writer import main; main()"
    )


def kills(scale: float, seed: int, folder: Path) -> Rows:
    """SIGKILL in the middle of writing, beside another engine."""
    rng, nbytes, budget = random.Random(seed), (1_000, 500_000), 8 << 30  # nothing is deleted for room
    count = max(3, round(100 * scale))
    made = Made(sealing_of(None), nbytes)
    settings = {"folder": str(folder), "budget": budget, "nbytes": nbytes, "key": None, "count": _APART}
    beside = Writer(first=_APART * 1000, pause_s=0.05, **settings)
    atexit.register(beside.kill)  # whatever ends this process
    lost = wrong = read = torn = failed = 0
    certain: dict[int, int] = {}  # blocks by first number
    for i in range(count):
        writer = Writer(first=_APART * i, **settings)
        time.sleep(rng.uniform(0.001, 0.1))
        certain[_APART * i] = writer.kill()
        try:
            with a_tier(folder, budget, made._sealing, nbytes[1]) as tier:
                torn = max(torn, tier.counts.damaged)
                numbers = [first + n for first, n in certain.items() for n in range(n)]
                some = rng.sample(numbers, min(len(numbers), 200)) + list(
                    range(_APART * i, _APART * i + certain[_APART * i] + 20)
                )
                found = read_all(tier, made, some)
                must = set(numbers)
                lost += len([number for number in found["missing"] if number in must])
                wrong += len(found["wrong"])
                read += len(found["right"])
        except Exception as error:  # noqa: BLE001 - counted and shown
            failed += 1
            print(f"  kill {i}: {type(error).__name__}: {error}", flush=True)
    certain[_APART * 1000] = beside.kill()
    with a_tier(folder, budget, made._sealing, nbytes[1]) as tier:
        everything = [first + n for first, n in certain.items() for n in range(n)]
        last = read_all(tier, made, everything)
        damaged, held = tier.counts.damaged, len(tier)
        stored = sum(len(made.content(number)) for number in last["right"])
    lost += len(last["missing"])
    wrong += len(last["wrong"])
    return [
        finding("killed in the middle of writing", count, "100", True, blocks=len(everything)),
        finding("blocks read and compared", read + len(last["right"]), "", True),
        finding("wrong blocks", wrong, "0", wrong == 0),
        finding("written blocks that are missing", lost, "0", lost == 0),
        finding("folders that could not be opened", failed, "0", failed == 0),
        finding(
            "damaged parts in the end",
            damaged,
            f"at most {count + 1}, one for each kill",
            damaged <= count + 1,
        ),
        finding(
            "blocks that are indexed", held, f"at least {len(last['right'])}", held >= len(last["right"])
        ),
        finding("their bytes", stored, "", True, folder=folder_bytes(folder)),
    ]


def _some_folder(folder: Path, made: Made, *, blocks: int, nbytes: int) -> list[int]:
    """Write a completed segment, and another one that was not completed. Returns the blocks' numbers."""
    numbers = list(range(blocks))
    with a_tier(folder, 1 << 26, made._sealing, nbytes) as tier:
        for number in numbers[: blocks // 2]:
            tier.write(made.block(number), made.content(number))
    with a_tier(folder, 1 << 26, made._sealing, nbytes) as tier:
        for number in numbers[blocks // 2 :]:
            tier.write(made.block(number), made.content(number))
        while tier._queued:
            time.sleep(0.001)
        (path,) = (segment.path for segment, _ in [tier._open])  # type: ignore[misc]
        whole = path.read_bytes()
    path.write_bytes(whole)  # without the end that closing has written
    return numbers


def flips(scale: float, seed: int, folder: Path) -> Rows:
    """One bit flipped, half of them under encryption."""
    rng, count = random.Random(seed), max(20, round(10_000 * scale))
    outcomes: Counter[str] = Counter()
    most_lost = 0
    key = make_key(folder)
    for name, sealing in (("plain", sealing_of(None)), ("encrypted", sealing_of(key))):
        made, where = Made(sealing, (20, 600)), folder / name
        numbers = _some_folder(where, made, blocks=24, nbytes=600)
        files = [path for path in sorted(where.iterdir()) if path.suffix == SUFFIX]
        with a_tier(where, 1 << 26, sealing, 600) as tier:
            whole = read_all(tier, made, numbers)
        assert len(whole["right"]) == len(numbers), f"{name}: {whole}"
        for _ in range(count // 2):
            path = rng.choices(files, [path.stat().st_size for path in files])[0]
            at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
            if rng.random() < 0.5:  # before the folder is indexed
                _flip(path, at, bit)
                with a_tier(where, 1 << 26, sealing, 600) as tier:
                    most_lost = max(most_lost, _outcome(tier, made, numbers, outcomes))
            else:
                with a_tier(where, 1 << 26, sealing, 600) as tier:
                    _flip(path, at, bit)
                    _outcome(tier, made, numbers, outcomes)
            _flip(path, at, bit)
        with a_tier(where, 1 << 26, sealing, 600) as tier:
            assert len(read_all(tier, made, numbers)["right"]) == len(numbers), "all bits are flipped back"
    return [
        finding("bits flipped", sum(outcomes[x] for x in ("harmless", "noticed", "silent")), "10,000", True),
        finding("wrong blocks", outcomes["wrong"], "0", outcomes["wrong"] == 0),
        finding("failures", outcomes["failed"], "0", outcomes["failed"] == 0),
        finding("no block was lost", outcomes["harmless"], "", True),
        finding("a block was lost and damage counted", outcomes["noticed"], "", True),
        finding("a block was lost and nothing counted", outcomes["silent"], "0", outcomes["silent"] == 0),
        finding("most blocks that one bit cost", most_lost, "at most a segment's 12", most_lost <= 12),
    ]


def _flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ bit]))


def _outcome(tier: Any, made: Made, numbers: list[int], outcomes: Counter[str]) -> int:
    """Read all blocks, count what came of it, and return how many were lost."""
    try:
        found = read_all(tier, made, numbers)
    except Exception as error:  # noqa: BLE001 - counted and shown
        outcomes["failed"] += 1
        print(f"  {type(error).__name__}: {error}", flush=True)
        return 0
    outcomes["wrong"] += len(found["wrong"])
    is_counted = tier.counts.damaged > 0
    outcomes[
        "noticed" if found["missing"] and is_counted else "silent" if found["missing"] else "harmless"
    ] += 1
    return len(found["missing"])


def damage(scale: float, seed: int, folder: Path) -> Rows:
    """Files cut, zeroed, exchanged, copied and overwritten."""
    rng, count = random.Random(seed), max(20, round(2_000 * scale))
    sealing = sealing_of(None)
    made, source, copy = Made(sealing, (20, 600)), folder / "source", folder / "copy"
    numbers = _some_folder(source, made, blocks=24, nbytes=600)
    outcomes: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for _ in range(count):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        files = sorted(path for path in copy.iterdir() if path.suffix == SUFFIX)
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](rng, files)
        by_kind[kind] += 1
        before = outcomes["silent"]
        with a_tier(copy, 1 << 26, sealing, 600) as tier:
            _outcome(tier, made, numbers, outcomes)
        silent[kind] += outcomes["silent"] - before
    uncounted = sum(number for kind, number in silent.items() if kind not in _AT_A_BOUNDARY)
    return [
        finding("damaged folders", count, "2,000", True, **by_kind),
        finding("wrong blocks", outcomes["wrong"], "0", outcomes["wrong"] == 0),
        finding("failures", outcomes["failed"], "0", outcomes["failed"] == 0),
        finding("a block was lost and nothing counted", uncounted, "0", uncounted == 0, **silent),
    ]


def _cut(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    os.truncate(path, rng.randrange(path.stat().st_size))


def _zero(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randint(1, 2000))
    data[at:end] = bytes(end - at)
    path.write_bytes(data)


def _noise(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 40)):
        at = rng.randrange(len(data))
        data[at : at + 8] = rng.randbytes(len(data[at : at + 8]))
    path.write_bytes(data)


def _moved(rng: random.Random, files: list[Path]) -> None:
    """A piece of one file over a piece of the same or another one."""
    one, other = rng.choice(files).read_bytes(), rng.choice(files)
    data, length = bytearray(other.read_bytes()), rng.randint(8, 1500)
    at, to = rng.randrange(len(one)), rng.randrange(len(data))
    piece = one[at : at + length]
    data[to : to + len(piece)] = piece
    other.write_bytes(data)


def _left_out(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    data = path.read_bytes()
    at = rng.randrange(len(data))
    path.write_bytes(data[:at] + data[at + rng.randint(1, 900) :])


def _appended(rng: random.Random, files: list[Path]) -> None:
    with open(rng.choice(files), "ab") as file:
        file.write(rng.randbytes(rng.randint(1, 900)))


def _twice(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice(files)
    shutil.copy(path, path.with_name("0" + path.name))


def _joined(rng: random.Random, files: list[Path]) -> None:
    """One file after another, as one."""
    one, other = rng.sample(files, 2)
    with open(one, "ab") as file:
        file.write(other.read_bytes())


DAMAGES: dict[str, Callable[[random.Random, list[Path]], None]] = {
    "cut": _cut,
    "zeroed": _zero,
    "noise": _noise,
    "moved": _moved,
    "left out": _left_out,
    "appended": _appended,
    "twice": _twice,
    "joined": _joined,
    "deleted": lambda rng, files: rng.choice(files).unlink(),
    "emptied": lambda rng, files: rng.choice(files).write_bytes(b""),
}


def budget(scale: float, seed: int, folder: Path) -> Rows:
    """Two writers in one folder, sampled while they write ten times its budget."""
    nbytes, most = (20_000, 200_000), 64 << 20
    sealing = sealing_of(None)
    made = Made(sealing, nbytes)
    count = max(200, round(10 * most * scale / (sum(nbytes) / 2) / 2))
    settings = {"folder": str(folder), "budget": most, "nbytes": nbytes, "key": None, "count": count}
    writers = [Writer(first=_APART * i, **settings) for i in range(2)]
    sampled = [0]
    while any(writer._process.poll() is None for writer in writers):
        sampled.append(folder_bytes(folder))
        time.sleep(0.002)
    written = [writer.wait() for writer in writers]
    with a_tier(folder, most, sealing, nbytes[1]) as tier:
        segment = tier._folder.segment_bytes
        found = read_all(tier, made, [_APART * i + n for i in range(2) for n in range(count)])
        held, damaged = len(tier), tier.counts.damaged
    sizes = sum(len(made.content(number)) for number in found["right"])
    return [
        finding("blocks written", sum(written), f"{2 * count}", sum(written) == 2 * count),
        finding(
            "most bytes in the folder", max(sampled), f"at most {most} + {segment}",
            max(sampled) <= most + segment, samples=len(sampled), over_budget=max(0, max(sampled) - most),
        ),
        finding("wrong blocks", len(found["wrong"]), "0", not found["wrong"]),
        finding("blocks that are indexed", held, f"{len(found['right'])}", held == len(found["right"])),
        finding("damaged parts", damaged, "0", damaged == 0),
        finding("share of the budget in use", sizes / most, "at least 0.8", sizes >= 0.8 * most),
    ]  # fmt: skip


PARTS: dict[str, Callable[[float, int, Path], Rows]] = {
    "kills": kills,
    "flips": flips,
    "damage": damage,
    "budget": budget,
}


def main() -> None:
    """Run the parts, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write results beside those of other benchmarks")
    given = parser.parse_args()
    logging.getLogger("kvq").setLevel(logging.ERROR)  # each damage is a warning
    holds = True
    for part in given.parts.split(","):
        with tempfile.TemporaryDirectory(prefix=f"kvq-{part}-") as folder:
            began = time.perf_counter()
            rows = PARTS[part](given.scale, given.seed, Path(folder))
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
            where = RESULTS if given.write else Path(folder)
            holds &= report(where / f"tiers-{part}-cpu.json", rows, scale=given.scale, seed=given.seed)
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
