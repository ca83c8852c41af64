"""Trials of an engine over a folder of KV: failing disks, killed engines, and the time after a restart.

    python -m benchmarks.tiers.engine [--parts failing,crafted,killed,restart,stall] [--model DIR]

failing: disks that are full, read-only, or fail now and then, and a folder that is deleted: all requests must
be answered with the tokens that an engine without tiers gives. crafted: blocks of wrong sizes with right
digests. killed: an engine is killed while it serves, 100 times; a new one over the same folder must give the
same tokens. restart: time to first token of a long prompt, computed, and found on the disk by a new process.
stall: time of the decode steps of four requests while a long prompt comes back, beside the steps between.
The first three use the embedded model unless `--model` names another one; `--tokens` is the length of the
long prompt. Results go to benchmarks/results/tiers-<part>-cpu.json with --write.
"""

import argparse
import errno
import json
import logging
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvq
from benchmarks.findings import RESULTS, Rows, finding, report
from kvq.engine import LLM, RequestOutput, SamplingParams
from kvq.engine.requests.request_options import RequestOptions
from kvq.engine.steps.publisher import StepStats
from kvq.models import Model, load
from kvq.tiers import disk
from kvq.tiers.segment import HEADER_BYTES, SUFFIX, content_digest, records

_BLOCKS = 60  # of the pool
_DISK = "256MiB"
_ANSWER = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the parts are given."""

    model: str
    kv: str
    scale: float
    seed: int
    tokens: int
    folder: Path


def prompts(model: Model, count: int, seed: int) -> list[list[int]]:
    """Return random prompts of which some begin alike, too many for the pool together."""
    rng, vocabulary = random.Random(seed), model.geometry.vocab_size
    begins = [rng.choices(range(8, vocabulary), k=rng.randint(40, 160)) for _ in range(3)]
    return [
        rng.choice(begins) + rng.choices(range(8, vocabulary), k=rng.randint(1, 200)) for _ in range(count)
    ]


def said(outputs: list[RequestOutput]) -> list[list[int] | str]:
    """Return the tokens of each request, or its error."""
    return [str(one.error) if one.error else one.outputs[0].token_ids for one in outputs]


class Served:
    """What engines said, compared with one without tiers."""

    def __init__(self, model: Model, given: list[list[int]]) -> None:
        self.model, self.given = model, given
        with LLM(model, num_blocks=_BLOCKS) as llm:
            self.expected = said(llm.generate(given, _ANSWER))
        self.wrong = self.failed = self.served = self.from_disk = 0

    def run(self, folder: Path, **options: Any) -> None:
        """Serve all prompts with an engine over a folder, some at a time."""
        try:
            with LLM(self.model, num_blocks=_BLOCKS, kv_disk=_DISK, kv_dir=folder, **options) as llm:
                for at in range(0, len(self.given), 4):
                    outputs = llm.generate(self.given[at : at + 4], _ANSWER)
                    self.from_disk += sum(one.receipt.disk_tokens for one in outputs)
                    for expected, found in zip(self.expected[at:], said(outputs), strict=False):
                        self.served += 1
                        self.failed += isinstance(found, str)
                        self.wrong += expected != found
        except Exception as error:  # noqa: BLE001 - counted and shown
            self.failed += 1
            print(f"  {type(error).__name__}: {error}", flush=True)

    def rows(self, what: str) -> Rows:
        """Return what came of it."""
        return [
            finding(f"{what}: requests served", self.served, "", True, tokens_from_disk=self.from_disk),
            finding(f"{what}: requests or engines that failed", self.failed, "0", self.failed == 0),
            finding(f"{what}: answers that differ", self.wrong, "0", self.wrong == 0),
        ]


@contextmanager
def failing_now_and_then(rng: random.Random, share: float, number: int) -> Iterator[None]:
    """Within this context, a share of all calls that write or read at an offset fail; some write less."""
    write, read = os.pwrite, os.pread

    def pwrite(file: int, data: Any, offset: int) -> int:
        if rng.random() < share:
            if rng.random() < 0.5:
                write(file, memoryview(data)[: len(data) // 2], offset)
            raise OSError(number, os.strerror(number))
        return write(file, data[: max(1, len(data) // 2)] if rng.random() < 0.1 else data, offset)

    def pread(file: int, size: int, offset: int) -> bytes:
        if rng.random() < share:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, size, offset)

    retrying = patch.object(disk, "_RETRY_S", 0.01)  # otherwise the first failure is the only one
    with patch.object(os, "pwrite", pwrite), patch.object(os, "pread", pread), retrying:
        yield


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Within this context, no file of a folder can be opened for writing, deleted, or marked as used."""
    calls = {name: getattr(os, name) for name in ("open", "utime", "unlink", "mkdir", "truncate")}

    def refusing(name: str) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **more: Any) -> Any:
            is_inside = isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder)
            if is_inside and (name != "open" or arguments[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return calls[name](path, *arguments, **more)

        return call

    with patch.multiple(os, **{name: refusing(name) for name in calls}):
        yield


@contextmanager
def full_after(nbytes: int) -> Iterator[None]:
    """Within this context, no file of this process grows beyond `nbytes`, which the kernel sees to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing(setting: Setting) -> Rows:
    """Disks that fail."""
    model, rng = load(setting.model, setting.kv), random.Random(setting.seed)
    given = prompts(model, max(8, round(60 * setting.scale)), setting.seed)
    rows: Rows = []

    def tried(what: str) -> tuple[Served, Path]:
        return Served(model, given), setting.folder / what.replace(" ", "-")

    for share in (0.02, 0.3, 1.0):
        what = f"{share:.0%} of calls fail"
        served, folder = tried(what)
        served.run(folder)
        with failing_now_and_then(rng, share, errno.ENOSPC):
            for _ in range(3):
                served.run(folder, kv_host="4MiB")
        served.run(folder)
        rows += served.rows(what)
    served, folder = tried("full")
    with full_after(200_000):
        served.run(folder)
        served.run(folder, kv_host="4MiB")
    served.run(folder)
    rows += served.rows("full")
    served, folder = tried("read-only")
    served.run(folder)
    before = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    with read_only(folder):
        served.run(folder)
        served.run(folder, kv_host="4MiB")
    after = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    rows += [
        *served.rows("read-only"),
        finding("read-only: folder is unchanged", after == before, "", after == before),
    ]
    served, folder = tried("deleted")
    served.run(folder)
    stop = threading.Event()
    deleting = threading.Thread(target=_delete, args=(folder, stop))
    deleting.start()
    for _ in range(4):
        served.run(folder)
    stop.set()
    deleting.join()
    return [*rows, *served.rows("deleted while in use")]


def _delete(folder: Path, stop: threading.Event) -> None:
    while not stop.wait(0.05):
        for path in folder.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)
        if stop.wait(0.05):
            return
        shutil.rmtree(folder, ignore_errors=True)


def crafted(setting: Setting) -> Rows:
    """Blocks with right digests and wrong sizes, or those of other layer groups."""
    model = load(setting.model, setting.kv)
    given = prompts(model, 12, setting.seed)
    source = setting.folder / "source"
    served = Served(model, given)
    served.run(source)
    changes: dict[str, Callable[[bytes], bytes]] = {
        "shorter": lambda stored: stored[:-64],
        "longer": lambda stored: stored + bytes(64),
        "empty": lambda stored: b"",
        "five bytes": lambda stored: stored[:5],
    }
    rows: Rows = []
    for what, change in changes.items():
        folder = setting.folder / what.replace(" ", "-")
        shutil.copytree(source, folder)
        for path in folder.glob(f"*{SUFFIX}"):
            _rewrite(path, change)
        served = Served(model, given)
        served.run(folder)
        rows += served.rows(what)
    return rows


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the contents of all records, with digests that fit."""
    raw = path.read_bytes()
    found = [record for record in records(path, HEADER_BYTES, is_open=False) if record is not None]
    parts = [raw[:HEADER_BYTES]]
    for one in found:
        stored = change(raw[one.offset : one.end])
        digest = content_digest(one.name, one.group, stored)
        parts += [replace(one, nbytes=len(stored), digest=digest).pack(), stored]
    path.write_bytes(b"".join(parts))


def killed(setting: Setting) -> Rows:
    """Engines that are killed while they serve."""
    model, rng = load(setting.model, setting.kv), random.Random(setting.seed)
    count = max(3, round(100 * setting.scale))
    served = Served(model, prompts(model, 24, setting.seed))
    folder = setting.folder / "killed"
    for _ in range(count):
        child = _child("serve", setting, folder)
        time.sleep(rng.uniform(0.0, 0.6))
        child.kill()
        child.communicate()
        served.run(folder, kv_host=rng.choice(["0", "8MiB"]))
    return [finding("engines killed", count, "100", True), *served.rows("after a kill")]


def restart(setting: Setting) -> Rows:
    """TTFT of a long prompt in a new process: computed, and found on the disk."""
    times: dict[str, list[dict[str, Any]]] = {"computed": [], "found": []}
    for i in range(max(1, round(5 * setting.scale))):
        folder = setting.folder / f"restart-{i}"
        for what, each in times.items():
            out, said_there = _child("first_token", setting, folder, number=i).communicate()
            if not out.strip():
                raise SystemExit(f"{what}: {said_there}")
            each.append(json.loads(out.splitlines()[-1]))
        shutil.rmtree(folder)
    medians = {what: statistics.median(one["ttft_s"] for one in each) for what, each in times.items()}
    share = medians["found"] / medians["computed"]
    equal = all(x["tokens"] == y["tokens"] for x, y in zip(*times.values(), strict=True))
    found = times["found"]
    return [
        finding("TTFT computed, s", medians["computed"], "", True, all=times["computed"]),
        finding("TTFT after a restart, s", medians["found"], "", True, all=found),
        finding(
            "tokens from the disk",
            found[0]["disk_tokens"],
            f"of {setting.tokens}",
            found[0]["disk_tokens"] > 0,
        ),
        finding("share", share, "at most 0.1 (0.5 B: 0.025)", share <= 0.1),
        finding("equal answers", equal, "", equal),
    ]


def stall(setting: Setting) -> Rows:
    """Time of steps while a long prompt comes back from host memory or the disk, beside those between."""
    model, found = load(setting.model, setting.kv), list[Any]()
    blocks = 2 * setting.tokens // model.layout.block_size
    for where, options in {
        "host memory": {"kv_host": "8GiB"},
        "disk": {"kv_disk": "8GiB", "kv_dir": setting.folder / "stall"},
    }.items():
        with LLM(model, num_blocks=blocks, max_num_seqs=8, **options) as llm:
            times = _returns(llm, setting, max(2, round(8 * setting.scale)))
        rank = {kind: statistics.quantiles(own, n=10) for kind, own in times.items()}
        ratios = [rank["returning"][i] / rank["between"][i] for i in (0, 4, 8)]
        detail = {kind: [len(times[kind]), own[0], own[4], own[8]] for kind, own in rank.items()}
        what = f"a step beside a return from {where}, p10, median, p90"
        found.append(finding(what, ratios, "at most 1.1", ratios[1] <= 1.1, seconds=detail))
    return found


def _returns(llm: LLM, setting: Setting, count: int) -> dict[str, list[float]]:
    """Send a prompt that was demoted `count` times, while others run. Return seconds of decode steps."""
    core, rng, step = llm.core, random.Random(setting.seed), list[StepStats]()
    vocabulary, times = core.model.geometry.vocab_size, {"returning": [], "between": []}
    long = rng.choices(range(8, vocabulary), k=setting.tokens)
    options = RequestOptions(params=replace(_ANSWER, max_tokens=1), session="long")
    others = [rng.choices(range(8, vocabulary), k=64) for _ in range(4)]
    forever = RequestOptions(params=replace(_ANSWER, max_tokens=2000))
    core.on_step(step.append)
    llm.generate([long], options.params)
    for tokens in others:
        core.submit(core.intake.new_job(tokens, forever))
    for _ in range(count):
        job = core.intake.new_job(long, options)
        core.submit(job)
        while job in core.jobs:
            core.step()
        llm.hint("long", "demote")
        for _ in range(8):  # the blocks leave
            core.step()
        job = core.intake.new_job(long, options)
        core.submit(job)
        while job in core.jobs:
            core.step()
            if not step[-1].prefill_tokens:
                times["returning"].append(step[-1].seconds)
        for _ in range(20):
            core.step()
            times["between"].append(step[-1].seconds)
    for job in list(core.jobs):
        core.cancel(job)
    return times


def _child(function: str, setting: Setting, folder: Path, **more: Any) -> "subprocess.Popen[str]":
    """Start a process with this one's kvq that calls a function of this module and has loaded its model."""
    given = {
        "model": setting.model,
        "kv": setting.kv,
        "folder": str(folder),
        "tokens": setting.tokens,
        **more,
    }
    kvq_root, own_root = Path(kvq.__file__).parents[1], Path(__file__).parents[2]
    program = (
        f"import sys, json; sys.path.insert(0, {str(kvq_root)!r}); import kvq; "
        f"sys.path.insert(0, {str(own_root)!r}); from benchmarks.tiers import engine; "
        f"engine.{function}(**json.loads(sys.argv[1]))"
    )
    command = [sys.executable, "-P", "-c", program, json.dumps(given)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None, "it is a pipe"
    if child.stdout.readline() != "ready\n":
        raise SystemExit(child.communicate()[1])
    return child


def serve(*, model: str, kv: str, folder: str, **_: Any) -> None:
    """Serve the prompts of `killed` again and again; run in a process of its own."""
    loaded = load(model, kv)
    print("ready", flush=True)
    for seed in range(1000):
        with LLM(loaded, num_blocks=_BLOCKS, kv_disk=_DISK, kv_dir=folder, kv_host="2MiB") as llm:
            for _ in range(20):
                llm.generate(prompts(loaded, 24, 0 if seed % 2 == 0 else seed), _ANSWER)


def first_token(*, model: str, kv: str, folder: str, tokens: int, number: int) -> None:
    """Answer one prompt in a new engine and print its TTFT; run in a process of its own."""
    loaded = load(model, kv)
    print("ready", flush=True)
    vocabulary, rng = loaded.geometry.vocab_size, random.Random(number)
    prompt = rng.choices(range(8, vocabulary), k=tokens)
    blocks = 3 * (tokens // loaded.layout.block_size + 40)
    with LLM(loaded, num_blocks=blocks // 2, kv_disk="4GiB", kv_dir=folder, max_num_seqs=4) as llm:
        llm.generate([rng.choices(range(8, vocabulary), k=300)], _ANSWER)  # warms up
        output = llm.generate([prompt], _ANSWER)[0]
        began = time.perf_counter()
    found = {
        "ttft_s": output.timing.ttft_s,
        "queue_s": output.timing.queue_s,
        "disk_tokens": output.receipt.disk_tokens,
        "cached_tokens": output.receipt.cached_tokens,
        "tokens": output.outputs[0].token_ids,
        "close_s": time.perf_counter() - began,
    }
    print(json.dumps(found), flush=True)


PARTS: dict[str, Callable[[Setting], Rows]] = {
    "failing": failing,
    "crafted": crafted,
    "killed": killed,
    "restart": restart,
    "stall": stall,
}


def main() -> None:
    """Run the parts, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="failing,crafted,killed")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write results beside those of other benchmarks")
    given = parser.parse_args()
    logging.getLogger("kvq").setLevel(logging.ERROR)  # each failure is a warning
    holds = True
    for part in given.parts.split(","):
        with tempfile.TemporaryDirectory(prefix=f"kvq-{part}-") as folder:
            setting = Setting(
                model=given.model,
                kv=given.kv,
                scale=given.scale,
                seed=given.seed,
                tokens=given.tokens,
                folder=Path(folder),
            )
            began = time.perf_counter()
            rows = PARTS[part](setting)
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
            where = RESULTS if given.write else Path(folder)
            facts = {"model": given.model, "kv": given.kv, "scale": given.scale, "seed": given.seed}
            holds &= report(where / f"tiers-{part}-cpu.json", rows, **facts)
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
