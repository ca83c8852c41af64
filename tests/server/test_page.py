"""The page at `/`, in a real browser, and what it may be told."""

import base64
import fnmatch
import json
import os
import re
import signal
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

import kvq
from tests.server.browser import CHROMIUM, Browser
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

KEYS = ("alpha-key", "beta-key")  # sorted: key 1 and key 2
SECRET = "The unmistakable prompt about a heron"
IS_READY = "document.querySelector('#state').dataset.state === 'ready'"
PAGE = Path(kvq.__file__).parent / "server" / "page"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    options = []
    for name, keys in (("api-key-file", KEYS), ("metrics-key-file", ["gamma-key"])):
        (folder / name).write_text("\n".join(keys))
        (folder / name).chmod(0o600)
        options += [f"--{name}", str(folder / name)]
    with Server("--kv", "k8v4", "--num-blocks", "160", *options, key=KEYS[0]) as running:
        running.key_file = folder / "api-key-file"
        for key in KEYS:
            ask(running, key, prompt=SECRET, max_tokens=40)
        yield running


@pytest.fixture(scope="module")
def browser(server):
    with Browser(password=KEYS[0]) as one:
        one.open(server.url)
        one.wait(IS_READY)
        yield one


def ask(server, key, **options):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=HANG_S)
    return client.completions.create(model="tiny", **options)


def get(server, path, authorization=None):
    """(status, headers, body) of a GET."""
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, headers=headers), timeout=HANG_S
        ) as a:
            return a.status, a.headers, a.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def basic(password):
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


def test_every_file_of_the_page_is_installed_with_the_package():
    root = Path(kvq.__file__).parent
    patterns = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["kvq"]
    files = [str(path.relative_to(root)) for path in (root / "server/page").iterdir()]
    assert "server/page/index.html" in files
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in files)


def test_a_browser_is_asked_for_a_key_and_only_where_it_goes_by_itself(server):
    for path in ("/", "/pool", "/docs", "/openapi.json", "/page/page.js", "/page/nothing"):
        status, headers, _ = get(server, path)
        assert (status, headers["WWW-Authenticate"][:11]) == (401, "Basic realm")
        assert get(server, path, basic("wrong"))[0] == 401
        assert get(server, path, "Basic ~~~")[0] == 401
        assert get(server, path, basic(KEYS[1]))[0] == (404 if path == "/page/nothing" else 200)
        assert get(server, path, f"Bearer {KEYS[1]}")[0] != 401
    for path in ("/v1/models", "/metrics", "/health", "/pagex"):
        status, headers, _ = get(server, path, basic(KEYS[0]))
        assert (status, headers["WWW-Authenticate"]) == (401, None)


def test_the_version_has_the_shape_of_vllms(server):
    status, _, body = get(server, "/version", f"Bearer {KEYS[0]}")
    assert (status, json.loads(body)) == (200, {"version": kvq.__version__})
    assert get(server, "/version")[0] == 401


def test_a_key_for_metrics_alone_reads_them_and_asks_for_nothing(server):
    for path, status in (("/metrics", 200), ("/health/ready", 200), ("/v1/models", 403), ("/pool", 403)):
        assert get(server, path, "Bearer gamma-key")[0] == status
    with pytest.raises(openai.PermissionDeniedError, match="this key is for /metrics"):
        ask(server, "gamma-key", prompt="a", max_tokens=1)


@pytest.mark.parametrize("name", sorted(path.name for path in PAGE.iterdir() if path.suffix != ".svg"))
def test_no_file_of_the_pages_names_another_place(name):
    """They work without a network, and tell nobody that they were opened."""
    text = (PAGE / name).read_text(encoding="utf-8")
    assert (
        re.findall(
            r"""(?:https?:)?//[\w.-]+\.\w+|url\(|@import""", text.replace("http://www.w3.org/2000/svg", "")
        )
        == []
    )


@needs_browser
def test_the_api_is_written_out_in_a_browser(server):
    with Browser(password=KEYS[0]) as one:
        one.open(server.url + "/docs")
        one.wait(IS_READY)
        shown = one.run("document.querySelector('#routes').textContent")
        document = json.loads(get(server, "/openapi.json", f"Bearer {KEYS[0]}")[2])
        assert all(path in shown for path in document["paths"])
        assert all(name in shown for name in ("max_completion_tokens", "repetition_penalty", "guided_regex"))
        assert one.run("document.querySelector('#version').textContent") == kvq.__version__
        assert one.run("document.querySelectorAll('details').length") == sum(
            map(len, document["paths"].values())
        )
        assert one.errors == []


def test_the_policy_lets_nothing_in_from_elsewhere(server):
    for path in ("/", "/docs", "/page/style.css", "/page/docs.js", "/pool"):
        headers = get(server, path, basic(KEYS[0]))[1]
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_key_sees_its_own_requests_and_of_others_only_counts(server):
    before = json.loads(get(server, "/pool", basic(KEYS[1]))[2])["picture"]
    ask(server, KEYS[0], prompt=SECRET, max_tokens=3)
    server_sees = [get(server, "/pool", basic(key))[2] for key in KEYS]
    for text in server_sees:
        assert "heron" not in text
        assert not any(key in text for key in KEYS)
    first, second = (json.loads(text) for text in server_sees)
    assert (first["you"], second["you"]) == ("key 1", "key 2")
    numbers = [{request["number"] for request in one["picture"]["past"]} for one in (first, second)]
    assert all(numbers)
    assert not numbers[0] & numbers[1]
    assert second["picture"]["past"] == before["past"]
    for one in (first, second):
        tenants = {tenant["name"]: tenant for tenant in one["picture"]["tenants"]}
        assert {name for name, tenant in tenants.items() if tenant["latency"]} == {one["you"]}
        assert set(tenants) == {"key 1", "key 2"}


def test_blocks_add_up(server):
    pool, recent = json.loads(get(server, "/pool", basic(KEYS[0]))[2])["picture"]["pools"]
    assert [part["kv"] for part in recent["parts"]] == ["bf16"]
    cells = base64.b64decode(pool["cells"])
    assert len(cells) == pool["usage"]["total"] == 160
    assert cells.count(0) == pool["usage"]["free"]
    assert {cell >> 2 for cell in cells if cell} == {1, 2}
    assert [part["kv"] for part in pool["parts"]] == ["int8_per_channel", "int4_g32_s8_rot"]
    assert sum(part["block_bytes"] for part in pool["parts"]) <= pool["block_bytes"]


@needs_browser
def test_the_page_loads_and_asks_nobody_else(server, browser):
    assert browser.run("document.querySelector('#model').textContent") == "tiny"
    assert browser.num_asked >= 1
    assert all(url.startswith(server.url) for url in browser.urls)
    assert browser.errors == []


@needs_browser
def test_the_map_lives_while_requests_run(server, browser):
    browser.run("document.querySelector('.map details').open = true")
    browser.wait("document.querySelectorAll('#counts tbody tr').length >= 2")
    pixels = "document.querySelector('canvas.cells').toDataURL()"
    counts = "document.querySelector('#counts tbody').textContent"
    before = browser.run(pixels), browser.run(counts)
    endless = {"prompt": list(range(300, 500)), "max_tokens": 3800, "extra_body": {"ignore_eos": True}}
    with ask(server, KEYS[1], **endless, stream=True):
        browser.wait(f"{counts} !== {json.dumps(before[1])}")
        browser.wait("document.querySelector('#others').textContent.includes('key 2: 1 running')")
    browser.wait("!document.querySelector('#others').textContent.includes('running')")
    assert browser.run(pixels) != before[0]
    for view in ("tenant", "format", "state"):
        browser.run(f"document.querySelector('input[value={view}]').click()")
        browser.wait("document.querySelectorAll('#legend li').length >= 2")
    assert browser.errors == []


@needs_browser
def test_a_prompt_streams_into_the_page(server, browser):
    browser.run(f"document.querySelector('#key').value = {KEYS[0]!r}")
    browser.run("document.querySelector('#temperature').value = '0'")  # sampled texts may end early
    for kind in ("completion", "chat"):
        browser.run(f"document.querySelector('input[value={kind}]').click()")
        browser.run("document.querySelector('#send').click()")
        browser.wait("/^120 tokens in .*first after/.test(document.querySelector('#outcome').textContent)")
        assert browser.run("document.querySelector('#text').childNodes.length") > 10  # came in pieces
    browser.wait("document.querySelectorAll('#requests tbody tr').length >= 3")
    browser.run("document.querySelector('#key').value = 'wrong'")
    browser.run("document.querySelector('#send').click()")
    browser.wait("document.querySelector('#outcome').textContent.includes('API key')")
    assert browser.num_asked < 10  # no box of the browser's own for the prompt
    browser.errors.clear()  # the refusal is one of the console's


@needs_browser
def test_a_phone_needs_no_sideways_scrolling(browser):
    try:
        for width in (390, 320, 700):
            browser.resize(width, 844, ratio=2, is_phone=True)
            browser.wait(f"matchMedia('(width: {width}px)').matches")
            browser.wait("new Promise((drawn) => requestAnimationFrame(() => drawn(true)))")
            assert browser.run("document.documentElement.scrollWidth") <= width
    finally:
        browser.resize(1440, 1000)


@needs_browser
def test_every_control_is_named_and_reached_by_tab(browser):
    wanted = browser.run(
        "[...document.querySelectorAll('a, input, button, textarea, summary, [tabindex]')]"
        ".filter((e) => e.checkVisibility() && (e.type !== 'radio' || e.checked)).length"
    )
    browser.run("document.activeElement.blur(); window.reached = new Set(); scrollTo(0, 0)")
    for _ in range(wanted + 2):
        browser.press("Tab")
        browser.run("document.activeElement !== document.body && reached.add(document.activeElement)")
    assert browser.run("reached.size") == wanted
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    for node in nodes:
        facts = {fact["name"]: fact["value"].get("value") for fact in node.get("properties", [])}
        if facts.get("focusable") and node["role"]["value"] != "RootWebArea":
            assert node["name"]["value"].strip(), node["role"]
    browser.run("document.querySelector('canvas.cells').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('#spoken').textContent").startswith("Block 0: ")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('#spoken').textContent").startswith("Block 1: ")


def test_keys_are_read_again_on_sighup_while_a_stream_runs(server):
    """Last, since it changes the server's keys. What can't be used changes nothing, and the log says so."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEYS[1], max_retries=0, timeout=HANG_S)
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [next(stream)]
    server.key_file.write_text(f"{KEYS[0]}\ndelta-key\n")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: server.status("/v1/models", "delta-key") == 200, lambda: server.log)
    assert [server.status("/v1/models", key) for key in (*KEYS, "gamma-key")] == [200, 401, 403]
    server.key_file.chmod(0o644)
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "keys and certificate stay as they were" in server.log, lambda: server.log)
    assert [server.status("/v1/models", key) for key in (KEYS[0], "delta-key")] == [200, 200]
    pieces += list(stream)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert not re.search("alpha-key|delta-key", server.log)


@needs_browser
@pytest.mark.long  # a server of its own
def test_the_page_outlives_the_engine_and_the_server():
    state = "document.querySelector('#state').dataset.state"
    with Server("--kv", "int4", "--num-blocks", "64") as server, Browser() as browser:
        browser.open(server.url)
        browser.wait(IS_READY)
        os.kill(server.engine_pid, signal.SIGKILL)
        browser.wait(f"{state} === 'restarting'")
        browser.wait(IS_READY)
        assert "restarted once" in browser.run("document.querySelector('#state').textContent")
        assert browser.errors == []
        server.process.send_signal(signal.SIGTERM)
        browser.wait(f"{state} === 'gone'")
        assert browser.run("document.querySelector('.map').classList.contains('old')")
