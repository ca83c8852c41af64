"""Random requests made from the server's own OpenAPI document, and what the server makes of them.

    python benchmarks/fuzz_server.py [--cases 50000] [--seconds 3600] [--seed 0] [--out FOLDER]

Schemathesis makes requests that fit the document and some that don't. Of each that fits, more are made with
one value broken: depth, huge numbers, halves of characters, bytes that are no JSON. Asked is: no 5xx,
every refusal an error object, every answer as the document says, an engine that was never restarted, and
nothing left at the end. Writes FOLDER/fuzz-server-cpu.json; ends with 1 if something falls short.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import requests
import schemathesis
import torch
from fuzz_requests import Request, broken, requests_for
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvq.bench.serve_process import ServerProcess
from kvq.evals.results import envelope, source_commit, write_json

OPTIONS = (
    *(
        "--model",
        "tiny",
        "--kv",
        "int4",
        "--num-blocks",
        "64",
        "--max-num-seqs",
        "8",
        "--log-level",
        "warning",
    ),
    *("--max-model-len", "256"),  # so that "as long as the context" is not long
)
_ROUND = 25  # of schemathesis' cases, with one seed
_BROKEN = 20  # copies of each, broken
_KEPT = 20  # findings that are written down
_CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Fuzzer:
    """Sends cases, and collects what is wrong with their answers."""

    def __init__(self, url: str, model: str, seconds: float) -> None:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self.statuses: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.findings: list[str] = []
        self.slowest_s = 0.0
        self._requests = requests_for(schema, model)
        self._url = url
        self._session = requests.Session()
        self._deadline_s = monotonic() + seconds

    @property
    def count(self) -> int:
        """Cases sent."""
        return self.kinds.total()

    def run(self, cases: int, first_seed: int) -> None:
        """That many or a few more, round by round, each with its own seed; fewer if the time is over."""
        for number in itertools.count(first_seed):
            if self.count >= cases or monotonic() > self._deadline_s:
                return
            self._round(number)
            print(f"{self.count} cases, {len(self.findings)} findings", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Send no more, also if another thread is just doing so."""
        self._deadline_s = 0.0

    def _round(self, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=_ROUND,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(request=self._requests)
        def one(request: Request) -> None:
            if monotonic() < self._deadline_s:
                self._send(request, number)
                if request.kind == "right" and isinstance(request.case.body, dict):
                    for _ in range(_BROKEN):
                        self._send(broken(request.case, odds), number)

        odds = random.Random(number)
        one()

    def _send(self, request: Request, number: int) -> None:
        case = request.case
        self.kinds[request.kind] += 1
        began = monotonic()
        try:
            if request.text is None:
                answer = case.call(session=self._session, timeout=60)
            else:
                url = self._url + case.formatted_path
                headers = {"Content-Type": "application/json"}
                answer = self._session.request(
                    case.method, url, data=request.text, headers=headers, timeout=60
                )
        except (requests.RequestException, ValueError) as error:
            self._find(request, number, f"no answer: {error!r:.200}")
            return
        self.slowest_s = max(self.slowest_s, monotonic() - began)
        self.statuses[str(answer.status_code)] += 1
        wrong = wrong_with(answer.status_code, answer.content, case.path)
        if wrong is None:
            checks = [*_CHECKS, negative_data_rejection] if request.kind == "wrong" else _CHECKS
            try:
                case.validate_response(answer, checks=checks)
            except FailureGroup as group:
                wrong = " ".join(str(failure) for failure in group.exceptions)
        if wrong is not None:
            self._find(request, number, f"{answer.status_code}: {wrong}")

    def _find(self, request: Request, number: int, what: str) -> None:
        body = repr(request.case.body) if request.text is None else repr(request.text)
        case = request.case
        self.findings.append(f"seed {number}: {case.method} {case.formatted_path} {body:.800}: {what:.600}")
        print(self.findings[-1], file=sys.stderr)


def wrong_with(status: int, content: bytes, path: str) -> str | None:
    """What is wrong with an answer, whatever was asked."""
    if status >= 500:
        return f"the server's fault: {content[:300]!r}"
    if status >= 400:
        return None if is_error_object(content, path) else f"no error object: {content[:300]!r}"
    if content.startswith((b"data:", b"event:")) and b'"error"' in content.rsplit(b"data: ", 1)[-1]:
        return f"a stream that failed: {content[-300:]!r}"
    return None


def is_error_object(content: bytes, path: str) -> bool:
    """True for OpenAI's; on the paths of Anthropic's protocol for Anthropic's."""
    try:
        body = json.loads(content)
    except ValueError:
        return False
    if path.startswith("/v1/messages"):
        return set(body) == {"type", "error"} and set(body["error"]) - {"details"} == {"type", "message"}
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


async def fuzz(cases: int, seconds: float, first_seed: int) -> list[dict[str, Any]]:
    """A server's answers to that many cases, as rows."""
    async with ServerProcess([*OPTIONS, *NO_BOUNDS]) as server:
        pid = server.engine_pid
        target = server.target
        fuzzer = Fuzzer(f"http://{target.host}:{target.port}", target.model, seconds)
        try:
            await asyncio.to_thread(fuzzer.run, cases, first_seed)
        finally:
            fuzzer.end()
        left = await _left(server)
        deep = await server.status("/health/deep")
        restarts = (await server.metrics())["kvq_engine_restarts_total"]
        same = server.engine_pid == pid
        errors = [line for line in server.log.splitlines() if "level=error" in line]
    return [
        finding("cases", fuzzer.count, f"{cases}", fuzzer.count >= cases, kinds=fuzzer.kinds),
        finding("answers", dict(fuzzer.statuses), "no 5xx", not any(s >= "500" for s in fuzzer.statuses)),
        finding("findings", len(fuzzer.findings), "0", not fuzzer.findings, first=fuzzer.findings[:_KEPT]),
        finding("errors in the log", len(errors), "0", not errors, first=errors[:_KEPT]),
        finding("restarts of the engine", restarts, "0", restarts == 0 and same),
        finding("requests and live blocks left", left, "0", left == 0),
        finding("/health/deep", deep, "200", deep == 200),
        finding("slowest answer, s", round(fuzzer.slowest_s, 2), "60", fuzzer.slowest_s < 60),
    ]


async def _left(server: ServerProcess) -> float:
    """Requests and live blocks that are there, once those of the last answer are gone; pins hold theirs."""
    for _ in range(50):
        seen = await server.metrics()
        running = sum(value for name, value in seen.items() if name.startswith("kvq_engine_requests/"))
        live = sum(v for name, v in seen.items() if name.startswith("kvq_blocks/") and name.endswith("/live"))
        pinned = sum(value for name, value in seen.items() if name.startswith("kvq_blocks_pinned/"))
        if running + live == pinned:
            return 0.0
        await asyncio.sleep(0.1)
    return running + live - pinned


def main() -> None:
    """Fuzz, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no more cases are sent")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next have the next ones")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    source_commit()
    began = monotonic()
    rows = asyncio.run(fuzz(given.cases, given.seconds, given.seed))
    seconds = monotonic() - began
    result = envelope(
        sys.argv, torch.device("cpu"), rows, seconds=seconds, schemathesis=schemathesis.__version__
    )
    write_json(given.out / "fuzz-server-cpu.json", result)
    for row in rows:
        print(
            f"{'holds' if row['holds'] else 'FALLS SHORT':<12}{row['what']}: {row['found']} ({row['asked']})"
        )
        for line in row.get("first", ()):
            print(f"    {line}")
    sys.exit(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    main()
