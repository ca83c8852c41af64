"""A door of the fuzzer: requests made from the server's own OpenAPI document, and what it makes of them.

Schemathesis makes requests that fit the document and some that don't. Of each that fits, more are made with
one value broken: depth, huge numbers, halves of characters, bytes that are no JSON. Asked is: no 5xx,
every refusal an error object, every answer as the document says.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.fuzz.door import Tally
from benchmarks.fuzz.made_requests import Request, broken, requests_for
from kvq.bench.serve.client import Endpoint

_ROUND = 25  # of schemathesis' cases, with one seed
_BROKEN = 20  # copies of each, broken
_TIMEOUT_S = 60
_TOO_MUCH = 413  # a refusal, too, of which schemathesis does not know
_CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Requests:
    """Sends rounds of cases, each round from its own number, until told otherwise."""

    def __init__(self, target: Endpoint, tally: Tally, is_over: Callable[[], bool]) -> None:
        url = f"http://{target.host}:{target.port}"
        self.statuses: Counter[str] = Counter()
        self._requests = requests_for(schemathesis.openapi.from_url(f"{url}/openapi.json"), target.model)
        self._url = url
        self._tally = tally
        self._is_over = is_over
        self._session = requests.Session()

    def run(self, numbers: Iterator[int]) -> None:
        """Round by round."""
        for number in numbers:
            if self._is_over():
                return
            self._round(number)

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
            if not self._is_over():
                self._send(request, number)
                if request.kind == "right" and isinstance(request.case.body, dict):
                    for _ in range(_BROKEN):
                        self._send(broken(request.case, odds), number)

        odds = random.Random(number)
        one()

    def _send(self, request: Request, number: int) -> None:
        self._tally.run(lambda _: self._wrong(request), number)

    def _wrong(self, request: Request) -> str | None:
        """Return what is wrong with a request's response, and how to reproduce it."""
        case = request.case
        try:
            if request.text is None:
                answer = case.call(session=self._session, timeout=_TIMEOUT_S)
            else:
                answer = self._session.request(
                    case.method,
                    self._url + case.formatted_path,
                    data=request.text,
                    headers={"Content-Type": "application/json"},
                    timeout=_TIMEOUT_S,
                )
        except (requests.RequestException, ValueError) as error:
            return None if self._is_over() else _told(request, f"no answer: {error!r:.200}")
        self.statuses[str(answer.status_code)] += 1
        wrong = wrong_with(answer.status_code, answer.content, case.path)
        if wrong is None:
            is_judged = request.kind == "wrong" and answer.status_code != _TOO_MUCH
            checks = [*_CHECKS, negative_data_rejection] if is_judged else _CHECKS
            try:
                case.validate_response(answer, checks=checks)
            except FailureGroup as group:
                wrong = " ".join(str(failure) for failure in group.exceptions)
        return None if wrong is None else _told(request, f"{answer.status_code}: {wrong}")


def _told(request: Request, what: str) -> str:
    case = request.case
    body = repr(case.body) if request.text is None else repr(request.text)
    return f"{what:.500}: {case.method} {case.formatted_path} {body:.600}"


def wrong_with(status: int, content: bytes, path: str) -> str | None:
    """Return what is wrong with a response to any request."""
    if status >= 500:
        return f"the server's fault: {content[:300]!r}"
    if status >= 400:
        return None if is_error_object(content, path) else f"no error object: {content[:300]!r}"
    if content.startswith((b"data:", b"event:")) and b'"error":{' in content.rsplit(b"data: ", 1)[-1]:
        return f"a stream that failed: {content[-300:]!r}"
    if path.startswith("/api/") and content.rstrip().rpartition(b"\n")[2].startswith(b'{"error"'):
        return f"a stream that failed: {content[-300:]!r}"
    return None


def is_error_object(content: bytes, path: str) -> bool:
    """True for OpenAI's; on the paths of Anthropic's and Ollama's protocols for theirs."""
    try:
        body = json.loads(content)
    except ValueError:
        return False
    if path.startswith("/v1/messages"):
        return set(body) == {"type", "error"} and set(body["error"]) - {"details"} == {"type", "message"}
    if path.startswith("/api/"):
        return set(body) == {"error"} and isinstance(body["error"], str)
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
