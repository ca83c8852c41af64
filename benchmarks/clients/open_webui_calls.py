"""The API calls of Open WebUI, replayed with httpx: run in its own environment by try_clients.py.

    python open_webui_calls.py URL MODEL

As its routers openai.py, ollama.py and its retrieval send them (0.6). Ends with a traceback at the first call
that comes out otherwise than it should.
"""

import json
import sys

import httpx

ASK = [{"role": "user", "content": "Tell me of the sea."}]
TEXTS = ["the sea", "a city", "the sea"]


def lines(client: httpx.Client, path: str, body: dict) -> list[dict]:
    """What a streamed response holds, of either protocol."""
    found = []
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                found.append(json.loads(data))
    return found


def main(url: str, model: str) -> None:
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "a"}
    with httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
        assert model in [one["id"] for one in client.get("/v1/models").json()["data"]]
        body = {"model": model, "messages": ASK, "stream": True, "max_tokens": 12, "temperature": 0}
        chunks = lines(client, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        assert chunks[-1]["usage"]["completion_tokens"] == 12
        title = client.post(
            "/v1/chat/completions", json=body | {"stream": False, "max_completion_tokens": 12}
        ).json()
        assert title["choices"][0]["message"]["content"] == text
        embedded = client.post("/v1/embeddings", json={"input": TEXTS, "model": model}).json()["data"]
        assert len(embedded) == 3
        rank = {"model": model, "query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}
        ranked = client.post("/v1/rerank", json=rank).json()["results"]
        assert [one["index"] for one in ranked] == [1, 0]
        assert all(isinstance(one["relevance_score"], float) for one in ranked)
        assert client.get("/api/version").json()["version"]
        [name] = [one["model"] for one in client.get("/api/tags").json()["models"]]
        options = {"temperature": 0, "num_predict": 12}
        pieces = lines(
            client, "/api/chat", {"model": name, "messages": ASK, "stream": True, "options": options}
        )
        assert pieces[-1]["done"]
        assert "".join(one["message"]["content"] for one in pieces) == text
    print("Open WebUI's calls")


main(*sys.argv[1:3])
