"""Lines that are tried again after the engine ended."""

import asyncio
from types import SimpleNamespace

import pytest

from kvq.errors import EngineError
from kvq.server.batch.calls import Calls
from kvq.server.batch.lines import Line
from kvq.server.engine.remote import State
from kvq.server.http.problems import Problem


class Deaths(Calls):
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
    monkeypatch.setattr("kvq.server.batch.calls.Completions", answer)
    return made


def test_a_line_that_ends_the_engine_takes_no_others_with_it(calls):
    lines = [Line(number=i, custom_id=str(i), body={"poison": i == 7}) for i in range(20)]

    async def run():
        return await asyncio.gather(*(calls.answer(line) for line in lines), return_exceptions=True)

    found = asyncio.run(run())
    assert calls.num_deaths == 3
    assert isinstance(found.pop(7), Problem)
    assert found == [{"number": i} for i in range(20) if i != 7]


def test_nothing_is_waited_for_when_there_will_be_no_engine():
    calls = Deaths()
    calls._service.remote.state = State.FAILED
    with pytest.raises(EngineError):
        asyncio.run(calls.answer(Line(number=1)))
