"""Servers that end hand their requests over, and their streams go on until they end."""

import json
import signal
import threading
import urllib.request
from functools import partial

import kvq
from kvq.bench.serve.process import free_port
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

OPTIONS = ("--kv", "int4", "--num-blocks", "400", "--max-num-seqs", "8")
PROMPTS = ["Once upon a time", "The war of the", "In the year", "She said that"]
NEW = 400


def stream(server, prompt, seed, texts):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 1.0, "seed": seed}
    body |= {"stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[seed] += choice["text"]
                if choice["finish_reason"]:
                    texts[seed] += f"|{choice['finish_reason']}"


def test_a_server_that_ends_loses_no_token_of_its_streams():
    port = free_port()
    with Server(*OPTIONS, "--hand-over-listen", str(port)) as b:
        with Server(*OPTIONS, "--hand-over-to", str(port), "--grace", "0") as a:
            texts = [""] * len(PROMPTS)
            threads = [
                threading.Thread(target=partial(stream, a, prompt, i, texts))
                for i, prompt in enumerate(PROMPTS)
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: all(len(text) > 20 for text in texts), "streams have begun")
            a.process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(HANG_S)
            a.process.wait(HANG_S)
            assert a.process.returncode == 0, a.log
            assert "goes on in this engine" not in a.log
        assert b.log.count("took over a request with KV of") == len(PROMPTS)
    with kvq.LLM("tiny", "int4", num_blocks=400, max_num_seqs=8) as llm:
        params = [
            kvq.SamplingParams(max_tokens=NEW, temperature=1.0, seed=i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        whole = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert texts == [f"{one.text}|{one.finish_reason}" for one in whole]
