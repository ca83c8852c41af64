"""What is said to a body that can't be taken: where, what was given, what is allowed, what to do."""

import json

import pytest

from kvq.server.admission.rate_limits import TenantLimits
from kvq.server.http.guard import Access
from tests.server.asgi import Client, service, tinys_prompts

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
TEXT = {"type": "text", "text": "a"}
ONLY_TEXT = "this server reads text only"
LEAVE = "leave it out or describe it in words"
NO_PART = "a part is an object whose type is 'text', got"
BLOCKS = "'text' or 'thinking' or 'tool_use' or 'tool_result'"


def turn(content, role="user"):
    return {"messages": [{"role": role, "content": content}]}


def asked(content, role="user", **fields):
    return turn(content, role) | {"model": "tiny", "max_tokens": 1} | fields


@pytest.fixture(scope="module")
def client():
    return Client(service())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (turn([TEXT, IMAGE]), "messages.0.content.1", f"{ONLY_TEXT}, got an 'image_url' part; {LEAVE}"),
        (turn([{"type": "file"}]), "messages.0.content.0", f"{ONLY_TEXT}, got a 'file' part; {LEAVE}"),
        (
            turn([{"type": "refusal", "refusal": "No."}], "assistant"),
            "messages.0.content.0",
            f"{ONLY_TEXT}, got a 'refusal' part; {LEAVE}",
        ),
        (
            turn([{"type": "x" * 10**6}]),
            "messages.0.content.0",
            f"{ONLY_TEXT}, got a {'x' * 49!r:.50} part; {LEAVE}",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}] * 3},
            "messages.0.content.0",
            f"{ONLY_TEXT}, got an 'input_audio' part; {LEAVE}",
        ),
        (turn(7), "messages.0.content", f"{ONLY_TEXT}; give a text or a list of parts, got a number"),
        (turn(True), "messages.0.content", f"{ONLY_TEXT}; give a text or a list of parts, got a truth value"),
        (turn(IMAGE), "messages.0.content", f"{ONLY_TEXT}; give a text or a list of parts, got an object"),
        (turn(["a"]), "messages.0.content.0", f"{NO_PART} a text"),
        (turn([None]), "messages.0.content.0", f"{NO_PART} null"),
        (turn([{"text": "a"}]), "messages.0.content.0", f"{NO_PART} an object without a type"),
        (turn([{"type": [], "text": "a"}]), "messages.0.content.0", f"{NO_PART} a list for the type"),
        (turn([TEXT, {"type": "text"}]), "messages.0.content.1.text", "Field required"),
        (
            turn([{"type": "text", "text": 7}]),
            "messages.0.content.0.text",
            "Input should be a valid string, got 7",
        ),
        (
            turn([{"type": "input_text", "text": "a"}]),
            "messages.0.content.0",
            "an 'input_text' part is not known; did you mean 'text'?",
        ),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "Field required"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages.0",
            "function_call is not supported; use tool_calls",
        ),
    ],
)
def test_content_that_is_no_text_is_refused_in_words(client, path, body, param, said):
    status, _, answer = client.post(path, body)
    assert status == 400
    assert answer["error"]["message"] == f"{param}: {said}"
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_threads_are_refused_so_that_the_official_client_sends_whole_conversations(client, path):
    """Passed over, a thread's later requests would be answered as if nothing had been said before."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "a"}):
        status, _, answer = client.post(path, asked("a", thread=thread))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["details"] == {"error_code": "thread_unsupported_request"}
        assert answer["error"]["message"] == (
            "body: no thread is kept between requests; send the whole conversation, without thread"
        )
    status, _, answer = client.post(path, asked("a", compaction={"a": 1}))
    assert (status, answer["error"]["message"]) == (400, "body: compaction is not supported; leave it out")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            asked([TEXT, {"type": "image"}]),
            f"messages.0.content.1: {ONLY_TEXT}, got an 'image' block; {LEAVE}",
        ),
        (
            asked([{"type": "document"}]),
            f"messages.0.content.0: {ONLY_TEXT}, got a 'document' block; {LEAVE}",
        ),
        (
            asked([{"type": "tool_result", "tool_use_id": "a", "content": [TEXT, {"type": "image"}]}]),
            f"messages.0.content.0.content.1: {ONLY_TEXT}, got an 'image' block; {LEAVE}",
        ),
        (asked("a", system=[{"type": "image"}]), f"system.0: {ONLY_TEXT}, got an 'image' block; {LEAVE}"),
        (
            asked([{"type": "redacted_thinking"}], "assistant"),
            "messages.0.content.0: a 'redacted_thinking' block is of no use here, "
            f"only {BLOCKS}; leave it out",
        ),
        (asked(7), f"messages.0.content: {ONLY_TEXT}; give a text or a list of blocks, got a number"),
        (asked("a", system={}), f"system: {ONLY_TEXT}; give a text or a list of blocks, got an object"),
        (
            asked([{"text": "a"}]),
            f"messages.0.content.0: a block is an object whose type is {BLOCKS}, "
            "got an object without a type",
        ),
        (
            asked([{"type": "text", "text": 7}]),
            "messages.0.content.0.text: Input should be a valid string, got 7",
        ),
        (
            asked([{"type": "tool_use", "id": "a", "name": "f", "input": {}}]),
            "messages.0: a turn of role 'user' can't hold tool_use blocks",
        ),
        (
            asked("a", tools=[{"type": "bash_20250124"}]),
            "tools.0: tools of type 'bash_20250124' are not supported, only custom ones; leave it out, or "
            "run it yourself and offer it so",
        ),
    ],
)
def test_blocks_that_are_no_text_are_refused_in_words(client, path, body, said):
    status, _, answer = client.post(path, body)
    assert status == 400
    assert answer == {"type": "error", "error": {"type": "invalid_request_error", "message": said}}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": "a", "n": 10**9}, "n", "n: Input should be less than or equal to 128, got 1000000000"),
        ({"prompt": [1, -5]}, "prompt.1", "prompt.1: Input should be greater than or equal to 0, got -5"),
        ({}, "prompt", "prompt: Field required"),
        (
            {"prompt": "a", "logit_bias": {"x": 1}},
            "logit_bias.x",
            "logit_bias.x: String should match pattern",
        ),
        (
            {"prompt": "a", "logit_bias": {"01": 1, "1": -1}},
            "logit_bias.01",
            "logit_bias.01: String should match pattern '^(0|[1-9][0-9]{0,9})$'",
        ),
        (
            {"prompt": "a", "structured_outputs": {"x": 1}},
            "structured_outputs.x",
            "structured_outputs.x: Extra",
        ),
        (
            {"prompt": "a", "response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: json_schema belongs to type json_schema",
        ),
        ([], None, "body: Input should be a valid dictionary"),
    ],
)
def test_other_complaints_name_fields_as_the_client_wrote_them(client, body, param, said):
    status, _, answer = client.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": []}, "prompt: List should have at least 1 item after validation, not 0"),
        ({"prompt": [[]]}, "prompt.0: List should have at least 1 item after validation, not 0"),
        ({"prompt": ["a"] * 65}, "prompt: List should have at most 64 items after validation, not 65"),
        ({"prompt": {}}, "prompt: Input should be a text, token ids, or a list of these, got an object"),
        ({"prompt": True}, "prompt: Input should be a text, token ids, or a list of these, got true"),
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string, got 1"),
        ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer, got a text"),
        ({"prompt": [{}]}, "prompt.0: Input should be a valid integer, got an object"),
        ({"prompt": [1] * 100 + [2.5]}, "prompt.100: Input should be a valid integer, got 2.5"),
        ({"prompt": [["a"]]}, "prompt.0.0: Input should be a valid integer, got a text"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1: Input should be a valid integer, got a text"),
        ({"stop": ["b"] * 30_001}, "stop: List should have at most 64 items after validation, not 30001"),
        ({"stop": 7}, "stop: Input should be a valid string or list, got 7"),
        ({"stop": ["a", None]}, "stop.1: Input should be a valid string, got null"),
        ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer, got a text"),
        ({"guided_json": [1]}, "guided_json: Input should be a valid dictionary or string, got a list"),
        ({"priority": "x"}, "priority: Input should be 'interactive' or 'batch', got 'x'"),
    ],
)
def test_what_may_be_several_things_is_told_by_what_fits_it_best(client, fields, said):
    status, _, answer = client.post("/v1/completions", {"prompt": "a"} | fields)
    assert (status, answer["error"]["message"]) == (400, said)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("x", "tool_choice: Input should be 'none', 'auto' or 'required', got 'x'"),
        ({"type": "x"}, "tool_choice.type: Input should be 'function', got 'x'"),
        ({"type": "function"}, "tool_choice.function: Field required"),
        ({"type": "function", "function": {}}, "tool_choice.function.name: Field required"),
    ],
)
def test_a_tool_that_can_not_be_chosen_is_told_where_the_choice_is_wrong(client, choice, said):
    status, _, answer = client.post("/v1/chat/completions", turn("a") | {"tool_choice": choice})
    assert (status, answer["error"]["message"]) == (400, said)


def test_a_number_beyond_a_floats_is_told_by_its_field(client):
    status, _, answer = client.post("/v1/completions", b'{"prompt":"a","max_tokens":1e400}')
    said = "the body can't be read: max_tokens is 1e400; numbers may be -1.79e308 to 1.79e308"
    assert (status, answer["error"]["message"]) == (400, said)


def test_long_names_are_told_in_part(client):
    _, _, answer = client.post("/v1/completions", {"prompt": "a", "logit_bias": {"x" * 10**6: 1}})
    assert len(json.dumps(answer)) < 500


HELLO = {"prompt": "hello"}
WRONG = [
    ("/tokenize", b"{", 400),
    ("/tokenize", {"prompt": 5}, 400),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404),
    ("/v1/completions", {"prompt": "a", "n": "x"}, 400),
    ("/v1/completions", b"[" * 100_000, 400),
    ("/v1/messages/count_tokens", {"messages": []}, 400),
    ("/nowhere", {}, 404),
]


@pytest.fixture(scope="module")
def prompts():
    made = tinys_prompts()
    yield made
    made.close()


@pytest.mark.parametrize(("path", "body", "status"), WRONG)
def test_a_refused_request_costs_one_of_those_that_its_key_may_send(prompts, path, body, status):
    limits = TenantLimits(requests_per_minute=3)
    access = Access(api_keys=("one", "two"))
    client = Client(service(limits=limits, prompts=prompts), access)

    def post(path, body, key="one"):
        return client.post(path, body, authorization=f"Bearer {key}")[0]

    assert [post(path, body), post("/tokenize", HELLO), post(path, body)] == [status, 200, status]
    assert post("/tokenize", HELLO) == 429
    assert post("/tokenize", {"prompt": 5}) == 429, "no body is read any more"
    assert post("/tokenize", HELLO, "two") == 200
    assert [post(path, body, "none") for _ in range(9)] == [401] * 9
    assert [post("/tokenize", HELLO, "two") for _ in range(3)] == [200, 200, 429], "each counts once"
