"""Free runs: what a model answers by itself in a recorded conversation, and whether it is usable."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvq.engine import LLM, SamplingParams
from kvq.engine.requests.outputs import RequestOutput
from kvq.evals.watch import Progress
from kvq.models import Model
from kvq.server.tools.calling import Offer, ToolCalling, ToolChoice
from kvq.server.tools.format import Tool
from kvq.traces.kinds import is_json, parses
from kvq.traces.rendering import Stretch
from kvq.traces.sessions import RecordedSession
from kvq.traces.tasks.compare import fits, same_call

_SLACK = 48  # tokens that an answer may have beyond the recorded one, and half as many again
_AT_ONCE = 16  # requests
Key = tuple[int, int]  # numbers of session and message


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one turn."""

    token_ids: Sequence[int]
    text: str  # as generated
    content: str  # without calls
    calls: Sequence[Call]
    is_valid: bool  # calls name offered tools and fit their schemas, or the text parses as JSON, as recorded
    is_right: bool  # valid, and the calls are the recorded ones


class Question(NamedTuple):
    """Turn to be generated."""

    key: Key
    prompt: Sequence[int]
    max_tokens: int
    offer: Offer | None
    session: RecordedSession


def questions_of(
    model: Model,
    sessions: Sequence[RecordedSession],
    stretches: Sequence[Stretch],
    *,
    is_forced: bool = False,
) -> list[Question]:
    """Return the turns that decide something, in their order: those with calls, and those that are JSON.

    `is_forced`: a grammar leaves the model only calls of the offered tools where there is one.
    """
    calling, found = ToolCalling.of(model.tokenizer, "auto"), []
    for stretch in stretches:
        session = sessions[stretch.session]
        functions = [one["function"] for one in session.tools]
        tools = [Tool(name=one["name"], parameters=one.get("parameters") or {}) for one in functions]
        for answer in stretch.answers:
            message = session.messages[answer.message]
            calls = message.get("tool_calls") or ()
            if not calls and not is_json(str(message.get("content") or "").strip()):
                continue
            choice: ToolChoice = "required" if calls and is_forced else "auto"
            parallel = len(calls) != 1 or choice == "auto"
            length = answer.end - answer.first
            found.append(
                Question(
                    key=(stretch.session, answer.message),
                    prompt=stretch.tokens[: answer.first],
                    max_tokens=length + length // 2 + _SLACK,
                    offer=calling.offer(tools, choice=choice, parallel=parallel),
                    session=session,
                )
            )
    return found


def engine_for(model: Model, questions: Sequence[Question], kv_memory: str | None) -> LLM:
    """Return an engine that can answer the questions."""
    longest = max(len(one.prompt) + one.max_tokens for one in questions)
    options: dict[str, Any] = {} if kv_memory is None else {"kv_memory": kv_memory}
    options |= {"max_num_seqs": _AT_ONCE, "max_context": min(longest, model.prepared.max_context)}
    return LLM(model, **options)


def generate(llm: LLM, questions: Sequence[Question], progress: Progress) -> list[Outcome]:
    """Answer questions greedily.

    Raises:
        RequestError: a request failed.
    """
    params = [_params(one) for one in questions]
    outputs = llm.generate([list(one.prompt) for one in questions], params, progress=progress)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [_outcome(one, output) for one, output in zip(questions, outputs, strict=True)]


def _params(one: Question) -> SamplingParams:
    params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens)
    return params if one.offer is None else one.offer.params(params)


def _outcome(one: Question, output: RequestOutput) -> Outcome:
    said = output.outputs[0]
    content, calls = _read(one.offer, said.text)
    message = one.session.messages[one.key[1]]
    recorded = [
        Call(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    schemas = {tool.name: tool.parameters for tool in one.offer.tools} if one.offer else {}
    if recorded:
        is_valid = bool(calls) and all(
            call.name in schemas
            and parses(call.arguments)
            and fits(schemas[call.name], json.loads(call.arguments))
            for call in calls
        )
    else:
        is_valid = parses(said.text.strip())
    return Outcome(
        token_ids=said.token_ids,
        text=said.text,
        content=content,
        calls=calls,
        is_valid=is_valid,
        is_right=is_valid and are_same(recorded, calls, one.session),
    )


def are_same(some: Sequence[Call], others: Sequence[Call], session: RecordedSession) -> bool:
    """Return True if two lists of calls do the same."""
    tools = {tool["function"]["name"]: tool for tool in session.tools}
    return len(some) == len(others) and all(
        a == b or (a.name in tools and same_call(tools[a.name], a._asdict(), b._asdict()))
        for a, b in zip(some, others, strict=True)
    )


def _read(offer: Offer | None, text: str) -> tuple[str, list[Call]]:
    """Return a text without its calls, and the calls."""
    if offer is None:
        return text, []
    parser = offer.parser()
    events = [*parser.feed(text), *parser.close()]
    names = {event.call: event.name for event in events if event.call is not None and event.name is not None}
    calls = [
        Call(name, "".join(event.text for event in events if event.call == number))
        for number, name in names.items()
    ]
    return "".join(event.text for event in events if event.call is None), calls
