"""Conversion of request bodies to the engine's sampling parameters."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from kvq.engine import SamplingParams, StructuredOutput
from kvq.engine.grammar.source import GrammarLimits
from kvq.engine.requests.defaults import SamplingDefaults
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import RequestError
from kvq.server.admission.bodies import ChatBody, Common, CompletionBody
from kvq.server.http.ignored import Body
from kvq.server.http.problems import Problem
from kvq.strict_json import check_value

_MAX_SCHEMA_TEXT = GrammarLimits().max_bytes
_CALLED = {"max_completion_tokens": "max_tokens"}  # fields with names that differ from the engine's


# Each constraint's name in the engine, and in `guided_*` fields and `structured_outputs`
_CONSTRAINTS = {"regex": "regex", "choice": "choice", "lark": "grammar"}


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return the schema as JSON text, which spares garbage collection thousands of small objects."""
    return msgspec.json.encode(schema).decode()


def completion_params(body: CompletionBody, defaults: SamplingDefaults) -> SamplingParams:
    """Return a completion's parameters. If `max_tokens` is 0, the engine generates one token, to be dropped.

    Raises:
        Problem: the engine does not accept a parameter.
    """
    others = {
        "max_tokens": 1 if body.max_tokens == 0 else body.max_tokens,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "echo": False,  # the engine's text for the tokens may differ from the client's
    }
    return params_of(body, _other_fields(body) | others, defaults)


def chat_params(body: ChatBody, defaults: SamplingDefaults) -> SamplingParams:
    """Return a chat's parameters; raise Problem if the engine does not accept a parameter."""
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    others = {
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return params_of(body, _other_fields(body) | others, defaults)


def options_of(body: Common, params: SamplingParams, tenant: str) -> RequestOptions:
    """Return request options: parameters, tenant and priority (batch if `service_tier` is "flex")."""
    priority = body.priority or ("batch" if body.service_tier == "flex" else "interactive")
    return RequestOptions(
        params=params,
        priority=priority,
        tenant=tenant,
        cache_salt=body.cache_salt,
        session=body.session_id,
        retain_s=body.kv_retain,
        kv_format=body.kv_format,
    )


def params_of(body: Body, others: dict[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    """Return the engine's parameters from the body's fields of the same names.

    `others`: parameters whose name or form differs in the protocol. `defaults`: the model's values for
    fields that are omitted or null.

    Raises:
        Problem: the engine does not accept a parameter.
    """
    given = type(body).model_fields
    own = {f.name: getattr(body, f.name) for f in fields(SamplingParams) if f.name in given}
    named = {_CALLED.get(name, name) for name in body.model_fields_set if getattr(body, name) is not None}
    try:
        return SamplingParams(**defaults.fill(own | others, named))
    except RequestError as error:
        raise Problem(400, str(error)) from error


def _other_fields(body: Common) -> dict[str, Any]:
    """Return the parameters whose name or form in the protocol differs from the engine."""
    return {
        "top_k": body.top_k if body.top_k and body.top_k > 0 else None,
        "stop": body.stop or (),
        "include_stop": body.include_stop_str_in_output,
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()} or None,
        "structured": _take_structured(body),
    }


def _take_structured(body: Common) -> StructuredOutput | None:
    """Return the constraint, and remove its schema from the body; see `schema_text`."""
    format, guided = body.response_format, body.guided_json
    schema: Any = None
    if format is not None and format.type == "json_object":
        schema = {"type": "object"}
    elif format is not None and format.json_schema is not None:
        schema = format.json_schema.definition
    outputs = body.structured_outputs
    any_object = {"type": "object"} if outputs is not None and outputs.json_object else None
    newer = None if outputs is None else outputs.definition
    schema = _one("json_schema", schema, _schema(guided), _schema(newer), any_object)
    body.guided_json = body.structured_outputs = None
    if format is not None:
        format.json_schema = None
    given: dict[str, Any] = {"json_schema": None if schema is None else schema_text(schema)}
    for constraint, name in _CONSTRAINTS.items():
        given[constraint] = _one(name, getattr(body, f"guided_{name}"), getattr(outputs, name, None))
    return StructuredOutput(**given) if any(one is not None for one in given.values()) else None


def _one(name: str, *given: Any) -> Any:
    found = [constraint for constraint in given if constraint is not None]
    if len(found) > 1:
        raise Problem(400, f"{name} is given {len(found)} times; one constraint can hold")
    return found[0] if found else None


def _schema(given: dict[str, Any] | str | None) -> Any:
    if not isinstance(given, str):
        return given
    if len(given) > _MAX_SCHEMA_TEXT:
        raise Problem(400, f"guided_json may have {_MAX_SCHEMA_TEXT} characters", param="guided_json")
    try:
        schema = check_value(msgspec.json.decode(given))
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise Problem(400, f"guided_json is no JSON: {error}", param="guided_json") from error
    if not isinstance(schema, dict):
        raise Problem(400, "guided_json is a schema, a JSON object", param="guided_json")
    return schema
