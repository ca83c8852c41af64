"""A real server that drafts: the same answers to the real client, and what became of the drafts."""

import urllib.request

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.kit import Server

PROMPT = "One two three four, one two three four, one two three four, one two"
OPTIONS = ("--kv", "int4", "--num-blocks", "128", "--max-num-seqs", "8", "--metrics-names", "vllm")


def answers(server: Server) -> list[tuple[str, object]]:
    """Texts and usage: greedy, seeded, streamed, with a schema, and a stop string."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    common = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48}
    found = []
    for more in (
        {"temperature": 0},
        {"temperature": 1, "seed": 11, "logprobs": 2},
        {"temperature": 0, "stop": "f"},
    ):
        answer = client.completions.create(**common, **more)
        found.append((answer.choices[0].text, answer.usage))
    pieces = client.completions.create(**common, temperature=0, stream=True)
    found.append(("".join(piece.choices[0].text for piece in pieces), None))
    schema = {"type": "object", "properties": {"x": {"enum": ["one two three", "four"]}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0, response_format=form
    )
    found.append((chat.choices[0].message.content, chat.usage))
    return found


@pytest.fixture(scope="module")
def plain(common_server):
    return [text for text, _ in answers(common_server)]


@pytest.mark.parametrize("how", ["ngram,k=3,adapts=false", "draft,model=tiny-draft,adapts=false"])
def test_the_answers_are_those_without_drafts(plain, how):
    with Server(*OPTIONS, "--speculation", how) as running:
        found = answers(running)
        with urllib.request.urlopen(running.url + "/metrics") as page:
            text = page.read().decode()
    assert [text for text, _ in found] == plain
    details = [usage.completion_tokens_details for _, usage in found if usage is not None]
    accepted = sum(one.accepted_prediction_tokens for one in details if one is not None)
    rejected = sum(one.rejected_prediction_tokens for one in details if one is not None)
    assert accepted > 0 < rejected
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["kvq_tokens_accepted_total"] >= accepted  # the streamed one told no usage
    drafted = values["kvq_tokens_drafted_total"]
    assert drafted - values["kvq_tokens_accepted_total"] >= rejected
    assert drafted == values["vllm:spec_decode_num_draft_tokens_total"] > values["kvq_drafts_total"] > 0
