"""Lines that are tried again after the engine ended."""

import asyncio
from types import SimpleNamespace

import pytest

from kvq.errors import EngineError
from kvq.server.batch.lines import Line
from kvq.server.batch.run import _Calls
from kvq.server.engine.remote import State
from kvq.server.http.problems import Problem
from kvq.server.openai.sampling import _take_structured


class Deaths(_Calls):
    """An engine that a line with `poison` ends, with all that run beside it."""

    def __init__(self):
        super().__init__(SimpleNamespace(remote=SimpleNamespace(state=State.READY)))
        self.running = {}
        self.num_deaths = 0

    async def _body(self, line):
        return line

    async def run(self, line):
        end = self.running[line.number] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.sleep(0.001)
            if line.body.get("poison"):
                self.num_deaths += 1
                for other in self.running.values():
                    if not other.done():
                        other.set_exception(Problem(503, "the engine ended", retry_after_s=0))
            elif not end.done():
                await asyncio.sleep(0.002)
            if end.done():
                end.result()
            return {"number": line.number}
        finally:
            del self.running[line.number]


@pytest.fixture
def calls(monkeypatch):
    made = Deaths()
    answer = lambda service, line, tenant: SimpleNamespace(answer=lambda: made.run(line))  # noqa: E731
    monkeypatch.setattr("kvq.server.batch.run.Completions", answer)
    return made


def test_a_line_that_ends_the_engine_takes_no_others_with_it(calls):
    lines = [Line(number=i, custom_id=str(i), body={"poison": i == 7}) for i in range(20)]

    async def run():
        return await asyncio.gather(*(calls.answer(line) for line in lines), return_exceptions=True)

    found = asyncio.run(run())
    assert calls.num_deaths == 3
    assert isinstance(found.pop(7), Problem)
    assert found == [{"number": i} for i in range(20) if i != 7]


def test_a_line_that_is_tried_again_still_has_its_schema(monkeypatch):
    """Requests take schemas out of their bodies, whose copies would outlive them."""
    seen = []

    def taken(service, body, tenant):
        seen.append(_take_structured(body))

        async def answer():
            if len(seen) < 3:
                raise Problem(503, "busy", retry_after_s=0)
            return {}

        return SimpleNamespace(answer=answer)

    async def checked(given, body):
        return []

    monkeypatch.setattr("kvq.server.batch.run.Chat", taken)
    remote = SimpleNamespace(state=State.READY)
    calls = _Calls(SimpleNamespace(remote=remote, check_fields=checked, is_strict=False))
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": wanted}
    asyncio.run(calls.answer(Line(number=1, url="/v1/chat/completions", body=body)))
    assert len(seen) == 3
    assert seen[0] is not None
    assert seen == [seen[0]] * 3


def test_nothing_is_waited_for_when_there_will_be_no_engine():
    calls = Deaths()
    calls._service.remote.state = State.FAILED
    with pytest.raises(EngineError):
        asyncio.run(calls.answer(Line(number=1)))
