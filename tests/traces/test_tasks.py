"""Generated sessions: repeatable, with calls that fit, that a second world confirms, and that follow."""

import json
import re

import pytest

from kvq.errors import ConfigError
from kvq.traces.reading import read_log
from kvq.traces.tasks import TASKS, fits, generated, same_call
from kvq.traces.tasks.worlds import tool

TABLES = ("calendar", "files", "arithmetic", "lookup")
PROSE = "".join(f"Sentence {at} tells nothing of use. " for at in range(5000))
EXTRA = {"calendar": "event_id", "lookup": "order_id", "files": "path", "arithmetic": "amount"}


def calls(session):
    """Yield the place, the tool, the call, its arguments and its result for each turn with a call."""
    tools = {one["function"]["name"]: one for one in session.tools}
    for at, message in enumerate(session.messages):
        if message["role"] == "assistant":
            (call,) = message["tool_calls"]
            function = call["function"]
            result = session.messages[at + 1]
            assert result["tool_call_id"] == call["id"]
            yield at, tools[function["name"]], function, json.loads(function["arguments"]), result["content"]


def text_of(messages):
    return "\n".join(f"{one['content']}{json.dumps(one.get('tool_calls', ''))}" for one in messages)


@pytest.mark.parametrize("task", TASKS)
def test_a_session_depends_on_its_seed_and_number_alone(task):
    few, many = generated(task, 3, 7), generated(task, 5, 7)

    assert [one.messages for one in few] == [one.messages for one in many[:3]]
    assert [one.name for one in few] == [one.name for one in many[:3]]
    assert few[0].messages != generated(task, 1, 8)[0].messages != few[1].messages


@pytest.mark.parametrize("task", TASKS)
def test_each_call_fits_one_of_3_to_6_tools(task):
    for session in generated(task, 12, 1):
        made = list(calls(session))
        assert session.is_checked
        assert 3 <= len(session.tools) <= 6
        assert (4 <= len(made) <= 12) if task == "edits" else (2 <= len(made) <= 6)
        for _, offered, function, arguments, _ in made:
            assert fits(offered["function"]["parameters"], arguments)
            assert same_call(offered, function, function)


@pytest.mark.parametrize("task", TASKS)
def test_schemas_are_valid(task):
    jsonschema = pytest.importorskip("jsonschema")
    for session in generated(task, 4, 1):
        for offered in session.tools:
            schema = offered["function"]["parameters"]
            jsonschema.Draft202012Validator.check_schema(schema)
            for _, called, _, arguments, _ in calls(session):
                wanted = jsonschema.Draft202012Validator(schema).is_valid(arguments)
                assert fits(schema, arguments) == wanted
                assert wanted or called is not offered


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [1500, 3000, 30_000])
def test_sessions_have_about_the_tokens_that_are_asked_for(task, tokens):
    for session in generated(task, 3, 2, tokens=tokens):
        size = len(text_of(session.messages) + json.dumps(session.tools)) / 4
        assert 0.75 * tokens < size < 1.25 * tokens


@pytest.mark.parametrize("task", TASKS)
def test_all_that_a_call_says_stands_before_it(task):
    for session in generated(task, 12, 3):
        for at, offered, _, arguments, _ in calls(session):
            before = text_of(session.messages[:at]) + json.dumps(offered)
            for name, value in arguments.items():
                shown = f"{value:.2f}" if isinstance(value, float) else str(value)
                assert shown in before or shown.removesuffix(".00") in before, (name, value)


def rows_of(listing):
    """Return the rows of a listing by their names, with columns by theirs."""
    found = {}
    for line in listing.splitlines():
        name, _, columns = line.partition(": ")
        found[name] = dict(one.split(" ", 1) for one in re.split(r", (?=[a-z_]+ )", columns, maxsplit=4))
    return found


def answer_of(task, words, rows, last):
    """Return a part of the arguments that a request calls for, read from its words."""
    named = [
        row
        for name, row in rows.items()
        if f'"{name}"' in words or f"file {name}" in words or f"order {row.get('order_id')}" in words
    ]
    if "just" in words or "last result" in words:
        assert last, "something came before"
        return {EXTRA[task]: last}
    if task == "arithmetic":
        order = sorted(
            (words.index(f'"{name}"'), float(row["amount"]))
            for name, row in rows.items()
            if f'"{name}"' in words
        )
        second = order[1][1] if len(order) > 1 else int(re.search(r"times (\d+)", words)[1])
        return {"a": order[0][1], "b": second}
    if words.startswith("Add"):
        return {}
    if words.startswith("Write"):
        (row,) = named
        return {"address": row["address"]}
    if words.startswith("Invite"):
        guests = [row["owner"] for name, row in rows.items() if f'owner of the event "{name}"' in words]
        (chosen,) = [row for name, row in rows.items() if f'to the event "{name}"' in words]
        return {"event_id": chosen["event_id"], "email": guests[0] if guests else words.split()[1]}
    (row,) = named
    return {EXTRA[task]: row[EXTRA[task]]}


@pytest.mark.parametrize("task", TABLES)
def test_a_reader_of_the_listing_and_the_requests_makes_the_same_calls(task):
    compute = {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b}
    for session in generated(task, 20, 4):
        (_, _, _, _, listing), *made = calls(session)
        rows, last = rows_of(listing), None
        for at, _, function, arguments, result in made:
            wanted = answer_of(task, session.messages[at - 1]["content"], rows, last)
            assert wanted.items() <= arguments.items()
            name = function["name"]
            if name in compute:
                last = float(result)
                assert last == pytest.approx(compute[name](**arguments), abs=0.006)
            elif name == "move_file":
                last = f"{arguments['folder']}/{arguments['path'].rpartition('/')[2]}"
                assert result == f"moved to {last}"
            else:
                last = result.rpartition(" ")[2] if name == "create_event" else arguments.get(EXTRA[task])


def test_edits_applied_to_the_files_that_were_read_give_the_recorded_results():
    for session in generated("edits", 20, 5):
        files = {}
        for at, _, function, arguments, result in calls(session):
            path, words = arguments["path"], session.messages[at - 1]["content"]
            assert path == re.search(r"\S+/main.conf", words)[0].rstrip(".")
            if function["name"] == "read_file":
                files[path] = [line.partition(": ")[2] for line in result.splitlines()]
                first = {path: dict(line.split(" = ") for line in lines) for path, lines in files.items()}
                continue
            lines = files[path]
            if function["name"] == "append_line":
                lines.append(arguments["text"])
                number = len(lines)
            elif function["name"] == "write_line":
                number = arguments["line"]
                key = lines[number - 1].partition(" = ")[0]
                assert f"over line {number} " in words or f"line of {key} " in words
                lines[number - 1] = arguments["text"]
            else:
                (number,) = [
                    at for at, line in enumerate(lines, 1) if line.endswith(f" = {arguments['old']}")
                ]
                key = lines[number - 1].partition(" = ")[0]
                assert f"value of {key} with" in words or f"text {arguments['old']} with" in words
                if "its first value" in words:
                    assert arguments["new"] == first[path][key]
                elif "its value in" in words:
                    (other,) = files.keys() - {path}
                    assert f"{key} = {arguments['new']}" in files[other]
                lines[number - 1] = f"{key} = {arguments['new']}"
            assert result == f"{number}: {lines[number - 1]}"


@pytest.mark.parametrize("text", [None, PROSE])
def test_answers_stand_in_the_document_once(text):
    for session in generated("recall", 8, 6, text=text):
        document = session.messages[1]["content"]
        for at, _, _, arguments, _ in calls(session):
            subject = re.search(r"what is (.*)\?$", session.messages[at - 1]["content"])[1]
            sentence = f"{subject[0].upper()}{subject[1:]} is {arguments['value']}."
            assert document.count(f"{subject[1:]} is ") == document.count(sentence) == 1


CALL = tool("f", "Test.", {"text": {"type": "string"}, "count": {"type": "integer", "default": 3}})


@pytest.mark.parametrize(
    ("got", "is_same"),
    [
        ('{"text": " a ", "count": 3.0}', True),
        ('{"text": "a"}', True),
        ('{"count": 3, "text": "a"}', True),
        ('{"text": "A"}', False),
        ('{"text": "a", "count": "3"}', False),
        ('{"text": "a", "count": true}', False),
        ('{"text": "a", "count": 3, "more": null}', False),
        ('{"text": "a", "text": "a"}', False),
        ('{"text": "a"', False),
        ('["a"]', False),
        ("{}", False),
    ],
)
def test_calls_are_the_same_up_to_spelling(got, is_same):
    expected = {"name": "f", "arguments": '{"text": "a", "count": 3}'}

    assert same_call(CALL, expected, {"name": "f", "arguments": got}) is is_same
    assert not same_call(CALL, expected, {"name": "g", "arguments": got})


def test_true_is_not_one():
    one, true = ({"name": "f", "arguments": f'{{"text": "a", "count": {value}}}'} for value in ("1", "true"))

    assert not same_call(CALL, one, true)


NESTED = {
    "type": "array",
    "items": {"type": "object", "properties": {"x": {"enum": [1, "a"]}}, "required": ["x"]},
}


@pytest.mark.parametrize(
    ("schema", "value", "is_fit"),
    [
        (NESTED, [{"x": 1.0}, {"x": "a", "y": 2}], True),
        (NESTED, [{"x": True}], False),
        (NESTED, [{}], False),
        ({"type": "object", "additionalProperties": {"type": "number"}}, {"y": "2"}, False),
        ({"type": "object", "additionalProperties": False}, {"y": 2}, False),
        ({"type": "integer"}, 2.0, True),
        ({"type": "integer"}, 2.5, False),
        ({"type": "number"}, True, False),
        ({"type": ["string", "null"]}, None, True),
        ({}, [1], True),
    ],
)
def test_values_fit_schemas(schema, value, is_fit):
    assert fits(schema, value) is is_fit


def test_what_can_not_be_generated_is_refused():
    with pytest.raises(ConfigError, match="task must be one of calendar"):
        generated("diary", 1, 0)
    with pytest.raises(ConfigError, match="tokens must be from 1000"):
        generated("files", 1, 0, tokens=10)
    with pytest.raises(ConfigError, match="text must have at least"):
        generated("recall", 1, 0, text="short")
    with pytest.raises(ConfigError, match="text is for the task recall"):
        generated("files", 1, 0, text=PROSE)


def test_as_lines_of_a_log_they_are_read_back(tmp_path):
    sessions = generated("tools", 4, 9)
    lines = [{"messages": one.messages, "tools": one.tools, "session": one.name} for one in sessions]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    read = read_log(tmp_path / "s.jsonl").sessions

    assert [one.name for one in read] == [one.name for one in sessions]
    assert [[one.get("tool_calls") for one in x.messages] for x in read] == [
        [one.get("tool_calls") for one in x.messages] for x in sessions
    ]


@pytest.mark.parametrize(
    "schema",
    [{}, {"type": "objekt"}, {"properties": None}, {"required": None}, {"enum": None}, {"items": [1]}, True,
     {"properties": {"c": True}}, {"type": ["string", "object"]}, {"properties": {"a": {"type": 3}}}],
)  # fmt: skip
def test_schemas_that_say_little_fit_what_there_is(schema):
    for value in ({"a": 1}, {"a": [1, {"b": None}], "c": 2}):
        assert fits(schema, value)
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    call = {"name": "go", "arguments": '{"a": 1, "c": true}'}
    assert same_call(tool, call, call | {"arguments": '{"c": true, "a": 1.0}'})
    assert same_call({"function": {"name": "go"}}, call, call)
    assert not same_call(tool, call, call | {"arguments": '{"a": 1, "c": 1}'})
