#!/usr/bin/env bash
# openai 3.54.0 (Python): a streamed response that ends with response.incomplete, because max_output_tokens was reached, has no
# final response for the client: stream.get_final_response() raises RuntimeError after all events were read, although the last event
# holds the whole response. Expected: the response with status "incomplete", as responses.create() without streaming returns it,
# and as chat.completions.stream() returns a completion whose finish_reason is "length".
# Seen on 2026-12-01: last event "response.incomplete" with text "one two"; get_final_response "RuntimeError Didn't receive a
# `response.completed` event."
# Needs pip; some MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet openai==3.54.0 httpx
cat > seen.py <<'PY'
import json
import sys

import httpx
from openai import OpenAI

part = {"type": "output_text", "text": "one two", "annotations": []}
empty = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
item = empty | {"status": "incomplete", "content": [part]}
usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
response = {"id": "resp_1", "object": "response", "created_at": 0, "model": "m", "status": "in_progress", "output": []}
response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None}
ended = response | {"status": "incomplete", "output": [item], "usage": usage}
ended |= {"incomplete_details": {"reason": "max_output_tokens"}}
at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
events = [
    {"type": "response.created", "response": response},
    {"type": "response.output_item.added", "output_index": 0, "item": empty},
    {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
    {"type": "response.output_text.delta", **at, "delta": "one two", "logprobs": []},
    {"type": "response.output_text.done", **at, "text": "one two", "logprobs": []},
    {"type": "response.content_part.done", **at, "part": part},
    {"type": "response.output_item.done", "output_index": 0, "item": item},
    {"type": "response.incomplete", "response": ended},
]


def answer(request):
    if not json.loads(request.content).get("stream"):
        return httpx.Response(200, json=ended)
    lines = [f"event: {e['type']}\ndata: {json.dumps(e | {'sequence_number': i})}\n\n" for i, e in enumerate(events)]
    return httpx.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})


client = OpenAI(api_key="none", base_url="http://test/v1", http_client=httpx.Client(transport=httpx.MockTransport(answer)))
whole = client.responses.create(model="m", input="count", max_output_tokens=2)
with client.responses.stream(model="m", input="count", max_output_tokens=2) as stream:
    last = [event for event in stream][-1]
    try:
        final = stream.get_final_response().status
    except Exception as error:
        final = f"{type(error).__name__} {error}"
print("not streamed:", whole.status, "| last event:", last.type, repr(last.response.output_text), "| final:", final)
is_same = (whole.status, last.type, last.response.output_text) == ("incomplete", "response.incomplete", "one two")
sys.exit(not (is_same and "RuntimeError" in final))
PY
env/bin/python -W ignore seen.py 2> errors || { cat errors; exit 1; }
