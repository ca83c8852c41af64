"""Sessions and hints over HTTP, and KV on disk that outlives a server that was killed."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

TEXT = "A long story about the sea, a ship and the people on it, who wait for the wind. " * 12


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def cached(server: Server, **more: Any) -> int:
    """Ask for the story's next token; return how many tokens were cached."""
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, **more}
    return int(post(server, "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def refusal(server: Server, path: str, body: dict[str, Any]) -> tuple[str | None, str]:
    """The field that is at fault, and the message."""
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        post(server, path, body)
    error = json.loads(refused.value.read())["error"]
    return error.get("param"), error["message"]


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=HANG_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="child processes are read from /proc")
def test_a_killed_server_finds_its_prefixes_again(tmp_path: Path) -> None:
    options = ("--num-blocks", "64", "--kv", "int8", "--kv-disk", "16MiB", "--kv-dir", str(tmp_path / "kv"))
    with Server(*options) as server:
        assert cached(server) == 0
        whole = cached(server)
        written = lambda: metric(server, 'kvq_tier_bytes{tier="disk"}')  # noqa: E731 - as of the last step
        wait_for(lambda: cached(server, prompt=TEXT[:200]) >= 0 and written() > 50_000, lambda: server.log)
        number = server.process.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        for process in [number, *map(int, children)]:
            os.kill(process, signal.SIGKILL)
    with Server(*options) as server:
        assert cached(server) >= whole - 32
        assert metric(server, "kvq_prompt_tokens_from_disk_total") >= whole - 32


def test_hints_reach_the_engine() -> None:
    with Server("--num-blocks", "64", "--kv", "int8_per_token_head", "--kv-host", "16MiB") as server:
        cached(server, session_id="agent", kv_retain=60)
        assert metric(server, "kvq_blocks_pinned") > 0
        assert post(server, "/v1/kv/hint", {"session_id": "agent", "action": "demote"}) == {"accepted": True}
        assert cached(server) > 0
        assert metric(server, "kvq_prompt_tokens_from_host_total") > 0
        for body in (
            {"session_id": "agent", "action": "forget"},
            {"session_id": "", "action": "demote"},
            {"session_id": "agent", "action": "retain", "seconds": -1},
            {"action": "retain"},
        ):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(server, "/v1/kv/hint", body)
        hint = {"session_id": "agent", "action": "demote"}
        assert refusal(server, "/v1/kv/hint", {**hint, "tenant": "x"}) == (
            "tenant",
            "unknown field 'tenant'; known are action, seconds, session_id",
        )
        assert "did you mean 'seconds'" in refusal(server, "/v1/kv/hint", {**hint, "second": 5})[1]
        chat = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        for path, asked in (
            ("/v1/completions", {"model": "tiny", "prompt": "a"}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
        ):
            assert "kv_retain: needs session_id" in refusal(server, path, {**asked, "kv_retain": 9})[1]
            post(server, path, {**asked, "kv_retain": None, "max_tokens": 1})


def test_a_server_refuses_a_folder_that_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = Server("--kv-disk", "16MiB", "--kv-dir", str(tmp_path / "file"))
    assert server.process.wait(HANG_S) == 2
    assert "can't keep KV in" in server.log
