"""Embeddings, scores and ranked documents over HTTP are the library's."""

import json
from base64 import b64decode

import httpx2 as httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvq
from tests.engine.test_pooling import NORMALIZE, hidden_states, pooling, save
from tests.server.kit import Server
from tests.waiting import HANG_S

TEXTS = ["the sea", "a", "The history of the city and of its harbour, which is old.", "the sea"]
OPTIONS = ("--kv", "fp32", "--num-blocks", "256", "--max-num-seqs", "8")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'query' %}?{{ message.content }}{% endif %}"
    "{% if message.role == 'document' %}!{{ message.content }}{% endif %}"
    "{% endfor %}="
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte of printable texts, and the special ones below 3."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[:190]
    names = {"<pad>": 0, "<s>": 1, "</s>": 2} | {symbol: 3 + i for i, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=names, merges=[], unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("embedder"), "qwen3", "bare", pooling("lasttoken"), NORMALIZE)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"matryoshka_dimensions": [16]}
    (folder / "config.json").write_text(json.dumps(config))
    with Server(*OPTIONS, model=str(folder)) as server:
        server.folder = folder
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("reranker"), "qwen3", "classifier", pad_token_id=0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with Server(*OPTIONS, model=str(folder)) as server:
        server.folder = folder
        yield server


def post(server: Server, path: str, **body) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=HANG_S, headers={"Authorization": "Bearer none"})


def cosine(a: list[float], b: list[float]) -> float:
    return float(torch.nn.functional.cosine_similarity(torch.tensor(a), torch.tensor(b), dim=0))


def test_embeddings_are_transformers_in_all_forms(embedder):
    client = openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0, timeout=HANG_S)
    model, tokenizer = embedder.folder.name, byte_tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    whole = client.embeddings.create(model=model, input=TEXTS)  # as base64
    assert [one.index for one in whole.data] == [0, 1, 2, 3]
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == sum(map(len, ids))
    for tokens, one in zip(ids, whole.data, strict=True):
        wanted = torch.nn.functional.normalize(hidden_states(embedder.folder, tokens)[-1], dim=0)
        assert one.embedding == pytest.approx(wanted.tolist(), abs=1e-4)
    plain = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="float").data[0].embedding
    assert plain == pytest.approx(whole.data[0].embedding, abs=1e-6)
    raw = post(embedder, "/v1/embeddings", input=ids[0], encoding_format="base64").json()["data"][0][
        "embedding"
    ]
    assert torch.frombuffer(bytearray(b64decode(raw)), dtype=torch.float32).tolist() == pytest.approx(
        plain, abs=1e-5
    )
    lists = client.embeddings.create(model=model, input=ids[:2])
    assert [one.embedding for one in lists.data] == [
        pytest.approx(one.embedding, abs=1e-5) for one in whole.data[:2]
    ]
    short = client.embeddings.create(model=model, input=TEXTS[0], dimensions=16).data[0].embedding
    wanted = torch.nn.functional.normalize(torch.tensor(plain[:16]), dim=0)
    assert short == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_request_may_have_more_inputs_than_run_at_once(embedder):
    texts = [f"text {i % 40}" for i in range(300)]
    data = post(embedder, "/v1/embeddings", input=texts).json()["data"]
    assert [one["index"] for one in data] == list(range(300))
    assert data[0]["embedding"] == pytest.approx(data[280]["embedding"], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "empty"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": [[5], [1 << 20]]}, "vocabulary"),
        ({"input": "a", "dimensions": 17}, "dimensions may be 16, 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a" * 300}, "context"),
    ],
)
def test_what_cannot_be_embedded_is_refused(embedder, body, words):
    answer = post(embedder, "/v1/embeddings", **body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"], answer.text


def test_a_model_for_embeddings_generates_nothing(embedder):
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
        answer = post(embedder, path, **body)
        assert answer.status_code == 400, answer.text
    assert "makes embeddings" in post(embedder, "/v1/completions", prompt="a").json()["error"]["message"]


def test_embeddings_rank_by_cosines(embedder):
    data = [one["embedding"] for one in post(embedder, "/v1/embeddings", input=TEXTS).json()["data"]]
    wanted = [cosine(data[0], vector) for vector in data]
    scores = post(embedder, "/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
    assert [one["score"] for one in scores] == pytest.approx(wanted, abs=1e-4)
    ranked = post(
        embedder, "/v2/rerank", query=TEXTS[0], documents=[*TEXTS[:2], {"text": TEXTS[2]}], top_n=2
    ).json()
    assert ranked["results"][0]["index"] == 0
    assert ranked["results"][0]["document"] == {"text": TEXTS[0]}
    assert len(ranked["results"]) == 2


def test_pairs_are_scored_as_the_template_writes_them(reranker):
    documents = TEXTS[1:]
    pairs = [byte_tokenizer()(f"?{TEXTS[0]}!{document}=")["input_ids"] for document in documents]
    with kvq.LLM(reranker.folder, "fp32", num_blocks=64) as llm:
        wanted = [score for (score,) in llm.embed(pairs)]
    found = post(reranker, "/v1/rerank", query=TEXTS[0], documents=documents, return_documents=False).json()
    by_index = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [by_index[i] for i in range(3)] == pytest.approx(wanted, abs=1e-5)
    assert [one["relevance_score"] for one in found["results"]] == sorted(by_index.values(), reverse=True)
    assert all("document" not in one for one in found["results"])
    assert found["usage"]["total_tokens"] == sum(map(len, pairs))
    answer = post(reranker, "/v1/score", text_1=[TEXTS[0]] * 3, text_2=documents).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    for body in (
        {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
        {"text_1": "a"},
        {"text_1": [], "text_2": []},
    ):
        assert post(reranker, "/v1/score", **body).status_code == 400
    assert "scores pairs" in post(reranker, "/v1/embeddings", input="a").json()["error"]["message"]


def test_a_model_for_text_says_what_makes_embeddings(common_server):
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = post(common_server, path, **body)
        assert answer.status_code == 400
        assert "--pooling" in answer.json()["error"]["message"]
