"""kvq score: log-probabilities of completions in a file."""

import json

import pytest

import kvq as library
from kvq.engine import SamplingParams


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_generated_log_probabilities_have_ratios_of_exactly_1(tmp_path, kvq):
    prompts = [[5, 6, 7], [9] * 40]
    with library.LLM("tiny", "int4", exact=True, num_blocks=64) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=10, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
        )
    rows = [
        {
            "id": f"rollout {i}",
            "prompt": prompt,
            "completion": output.outputs[0].token_ids,
            "logprobs": [entry.logprob for entry in output.outputs[0].logprobs],
        }
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    rows[1]["logprobs"][4] *= 1 + 2**-50
    target = tmp_path / "out.jsonl"
    status, out, err = kvq("score", "tiny", "--kv", "int4", written(tmp_path / "in.jsonl", rows), target)
    assert not status, err
    assert "compared  2 with given logprobs; 1 differ" in out
    same, other = map(json.loads, target.read_text().splitlines())
    assert (same["id"], same["first_difference"], same["ratio_error"]) == ("rollout 0", None, 0.0)
    assert same["logprobs"] == rows[0]["logprobs"]
    assert (other["first_difference"], 0 < other["ratio_error"] < 1e-12) == (4, True)
    assert same["receipt"]["model"] == other["receipt"]["model"] == outputs[0].receipt.exact.model


def test_texts_are_tokenized(tmp_path, kvq):
    rows = [{"prompt": "Once upon", "completion": " a time"}]
    target = tmp_path / "out.jsonl"
    status, _, err = kvq("score", "tiny", "--kv", "int8", written(tmp_path / "in.jsonl", rows), target)
    assert not status, err
    row = json.loads(target.read_text())
    assert "id" not in row
    assert len(row["token_ids"]) == len(row["logprobs"]) > 0
    assert all(x < 0 for x in row["logprobs"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no lines"),
        ("[1]\n", "line 1: give a JSON object with a prompt and a completion"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "line 2: give a JSON object"),
        ('{"prompt": "a", "completion": ""}\n', "line 1: give a JSON object with a prompt"),
        (
            '{"prompt": "a", "completion": [5], "logprobs": [1, 2]}\n',
            "line 1: logprobs are a number for each",
        ),
        ('{"prompt": "a", "completion": "b", "logprobs": [1]}\n', "in token ids, got [1] for 'b'"),
        ('{"prompt": "a", "completion": [5], "logprobs": ["x"]}\n', "logprobs are a number"),
        ('{"prompt": "a", "completion": [5], "logprobs": 5}\n', "got 5 for [5]"),
        ('{"prompt": "a", "completion": [5], "logprobs": []}\n', "got [] for [5]"),
        ("\x00\n", "line 1: give a JSON object"),
        ('{"prompt": "a", "completion": [99999999]}\n', "outside the vocabulary"),
    ],
)
def test_lines_that_can_not_be_scored_are_named(tmp_path, kvq, text, said):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    status, _, err = kvq("score", "tiny", "--kv", "int8", source, target)
    assert status
    assert said in err
    assert not target.exists()


def test_numbers_far_from_the_models_and_whole_ones_are_compared(tmp_path, kvq):
    rows = [
        {"prompt": "a", "completion": [5, 6], "logprobs": [0, -2000]},
        {"prompt": "a", "completion": [5], "logprobs": None},
    ]
    target = tmp_path / "out.jsonl"
    status, _, err = kvq("score", "tiny", "--kv", "int8", written(tmp_path / "in.jsonl", rows), target)
    assert not status, err
    far, other = map(json.loads, target.read_text().splitlines())
    assert far["first_difference"] == 0
    assert far["ratio_error"] > 1e300
    assert "first_difference" not in other


def test_bytes_that_are_no_text_are_named(tmp_path, kvq):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xff\xfe\x80\n")
    status, _, err = kvq("score", "tiny", "--kv", "int8", source, target)
    assert status
    assert "line 1: give a JSON object" in err
