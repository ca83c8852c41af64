"""Hub names, against a small hub on loopback: download, revision, and errors that say what to do."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from kvq.cli import root
from kvq.models.describe.resolve import EMBEDDED
from tests.waiting import HANG_S

COMMIT = "a" * 40
FILES = {p.name: p.read_bytes() for p in EMBEDDED["tiny"].iterdir() if p.is_file()}
REFUSALS = {
    "gated": (403, "GatedRepo", "Access to model is restricted."),
    "missing": (404, "RepoNotFound", "Repository not found"),
}


class Hub(BaseHTTPRequestHandler):
    """Serves acme/tiny; acme/gated and acme/missing refuse as the real hub does."""

    seen: list[str] = []  # noqa: RUF012 - shared by the handler's instances on purpose

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        self.seen.append(self.path)
        _, _, rest = self.path.partition("acme/")
        name, _, tail = rest.partition("/")
        if name in REFUSALS:
            status, code, message = REFUSALS[name]
            self.reply(status, message.encode(), body, {"X-Error-Code": code, "X-Error-Message": message})
        elif tail.startswith("tree/"):
            entries = [
                {"type": "file", "path": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for f, b in FILES.items()
            ]
            self.reply(200, json.dumps(entries).encode(), body, {"Content-Type": "application/json"})
        elif self.path.startswith("/api/"):
            revision = tail.partition("revision/")[2].partition("?")[0] or "main"
            if revision not in ("main", "v1", COMMIT):
                headers = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}
                return self.reply(404, b"", body, headers)
            siblings = [{"rfilename": f, "size": len(b)} for f, b in FILES.items()]
            info = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.reply(200, json.dumps(info).encode(), body, {"Content-Type": "application/json"})
        else:
            content = FILES[tail.rpartition("/")[2].partition("?")[0]]
            etag = hashlib.sha256(content).hexdigest()
            self.reply(200, content, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        return None

    def reply(self, status, content, body, headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def kvq(endpoint, home, *args):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-m", "kvq", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_a_hub_model_is_downloaded_and_runs_then_comes_from_the_cache(hub, tmp_path, tiny):
    args = ("generate", "--model", "acme/tiny", "--kv", "fp32", "-n", "4", "Hello")
    first = kvq(hub, tmp_path, *args)
    assert first.returncode == 0, first.stderr
    same = CliRunner().invoke(root, ["generate", "--kv", "fp32", "-n", "4", "Hello"])
    assert first.stdout == same.stdout
    Hub.seen.clear()
    again = kvq(hub, tmp_path, *args, "--revision", "v1")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert not any("model.safetensors" in path for path in Hub.seen)


def test_inspect_downloads_no_weights(hub, tmp_path):
    Hub.seen.clear()
    done = kvq(hub, tmp_path, "inspect", "--model", "acme/tiny")
    assert done.returncode == 0, done.stderr
    assert not any("resolve" in path and "safetensors" in path for path in Hub.seen)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "acme/gated"], "acme/gated is gated: accept its terms"),
        (["--model", "acme/missing"], "no public model of that name on the hub"),
        (["--model", "acme/tiny", "--revision", "v9"], "acme/tiny has no revision 'v9'"),
    ],
)
def test_hub_refusals_say_what_to_do(hub, tmp_path, args, says):
    done = kvq(hub, tmp_path, "inspect", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_out_of_reach_is_one_clear_line(tmp_path):
    done = kvq("http://127.0.0.1:9", tmp_path, "inspect", "--model", "acme/tiny")
    assert done.returncode == 2
    assert "the hub can't be reached" in done.stderr
    assert "Traceback" not in done.stderr
