"""kvq replay: answers that come out alike, and what is said of those that don't."""

import json

import pytest
from safetensors.torch import load_file, save_file

from kvq.commands.use.replay import _difference, _without_ids
from kvq.engine.requests.outputs import ExactReceipt
from kvq.models.describe.resolve import EMBEDDED

RECEIPT = {
    "max_tokens": 9,
    **{
        "digest": "d",
        "model": "m",
        "recipe": "r",
        "program": "p",
        "request": "q",
        "seed": 3,
        "prompt": "0000000011111111",
    },
    **{"kv": ["k"], "tokens": ["aaaaaaaabbbbbbbbcccccccc", "dddddddd"]},
}
ANSWER = [ExactReceipt(**RECEIPT)], [{"text": "one"}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"model": "x", "kv": ["x"]}, "the model's weights, config or tokenizer differ"),
        ({"recipe": "x"}, "the KV formats differ"),
        ({"program": "x"}, "it was computed by p, and now by x"),
        (
            {"request": "x"},
            "the request differs; without a seed, several prompts of one request can't be replayed",
        ),
        ({"digest": "x"}, "the receipt is another one"),
        ({"seed": 4}, "the receipt is another one"),
        ({"tokens": ["aaaaaaaabbbbbbbbcccccccd", "dddddddd"]}, "result 0 differs from token 2 on"),
        ({"tokens": ["aaaaaaaa", "dddddddd"]}, "result 0 differs from token 1 on"),
        ({"tokens": ["aaaaaaaabbbbbbbbcccccccc", "dddddddx"]}, "result 1 differs from token 0 on"),
        ({"prompt": "0000000011111112"}, "log-probabilities of the prompt differ from entry 1 on"),
        ({"kv": ["x"]}, "the stored K and V differ, although all tokens are alike"),
    ],
)
def test_the_first_difference_is_named(change, said):
    assert _difference(ANSWER, ([ExactReceipt(**(RECEIPT | change))], ANSWER[1])) == said


def test_missing_and_changed_answers_are_named():
    assert _difference(ANSWER, None).startswith("no answer this time")
    assert _difference(ANSWER, (ANSWER[0], [{"text": "two"}])).startswith("texts or numbers")


def test_ids_of_tool_calls_may_differ():
    choices = [{"index": 0, "message": {"tool_calls": [{"id": "call_1", "function": {"name": "f"}}]}}]
    other = json.loads(json.dumps(choices).replace("call_1", "call_2"))
    assert _without_ids(choices) == _without_ids(other)
    assert _without_ids(choices)[0]["message"]["tool_calls"] == [{"function": {"name": "f"}}]


@pytest.fixture
def batch(tmp_path, kvq):
    """Requests of all kinds, answered by an exact engine from a copy of the embedded model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in EMBEDDED["tiny"].iterdir():
        if file.is_file() and file.suffix in (".json", ".safetensors", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [
        {"prompt": "Once upon a time", "max_tokens": 9, "logprobs": 1},
        {"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0.9},
        {
            "prompt": ["The war", "In 1914 , the river"],
            "max_tokens": 5,
            "temperature": 0.9,
            "seed": 4,
            "n": 2,
        },
        {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True},
    ]
    lines = [
        {
            "custom_id": str(i),
            "url": f"/v1/{'chat/' * ('messages' in body)}completions",
            "body": body | {"model": "model"},
        }
        for i, body in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, _, err = kvq("run-batch", folder, "--kv", "int4", "--exact", "--num-blocks", 16, source, target)
    assert not status, err
    return folder, source, target


def test_answers_are_alike_in_another_process_and_a_flipped_bit_of_weights_is_found(batch, kvq):
    folder, source, target = batch
    status, out, err = kvq("replay", folder, "--kv", "int4", "--num-blocks", 44, source, target)
    assert not status, err + out
    assert "replayed  4 answers: 4 alike, 0 differ" in out

    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[:1].view(dtype=__import__("torch").uint8)[0] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    status, out, _ = kvq("replay", folder, "--kv", "int4", source, target)
    assert status == 1
    assert out.count("the model's weights, config or tokenizer differ") == 4


def test_a_damaged_receipt_is_named_with_its_token(batch, kvq):
    folder, source, target = batch
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    for row in rows:
        receipt = row["response"]["body"]["usage"]["exact_receipts"][0]
        trace = receipt["tokens"][0]
        receipt["tokens"][0] = trace[:24] + ("0" if trace[24] != "0" else "1") + trace[25:]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = kvq("replay", folder, "--kv", "int4", source, target)
    assert status == 1
    assert out.count("result 0 differs from token 3 on") == 4


def test_files_without_receipts_are_refused(tmp_path, kvq):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"custom_id": "a", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}\n'
    )
    target.write_text('{"custom_id": "a", "response": {"body": {"choices": [], "usage": {}}}}\n')
    status, _, err = kvq("replay", "tiny", "--kv", "int4", source, target)
    assert status
    assert "has no receipts of exact answers; write some: kvq run-batch --exact" in err
    answer = {"choices": [], "usage": {"exact_receipts": [RECEIPT]}}
    line = json.dumps({"custom_id": "a", "response": {"body": answer}}).encode()
    for content, said in (
        (b"not JSON", "line 1 is no result of kvq run-batch"),
        (b"\xff\xfe", "line 1 is no result"),
        (line.replace(b'"kv"', b'"vk"'), "line 1 is no result"),
        (line.replace(b"[{", b'"abc", "x": [{'), "line 1 is no result"),
        (line + b"\n" + line, "line 2: 'a' was answered before"),
    ):
        target.write_bytes(content + b"\n")
        status, _, err = kvq("replay", "tiny", "--kv", "int4", source, target)
        assert status
        assert said in err, content
