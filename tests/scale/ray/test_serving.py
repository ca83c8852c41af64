"""Two replicas of the embedded model under a real Ray: the OpenAI routes, failover, rolling updates."""

import asyncio
from functools import partial

import openai
import pytest

import kvq.integrations.ray
from tests.scale.ray.cluster import ENGINE, REPLICA, Load, gone, kill_one, pids_of
from tests.waiting import HANG_S, wait_for

serve = pytest.importorskip("ray.serve")
SEATS = 8


def deploy(*, seats: int = SEATS, **options) -> None:
    """Two replicas of 8 seats, unless told otherwise; returns when they serve."""
    options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}} | options
    engine = {"num_blocks": 256, "max_num_seqs": seats}
    serve.run(kvq.integrations.ray.application("tiny", kv="int4", engine=engine, **options))


@pytest.fixture(scope="module")
def client(url):
    deploy()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as made:
        yield made


def test_openais_client_streams_chats_and_is_told_what_is_wrong(client):
    asked = {"model": "tiny", "prompt": "In the north of the country", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    chunks = list(client.completions.create(**asked, stream=True))
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    talk = [{"role": "user", "content": "Who are you?"}]
    answer = client.chat.completions.create(model="tiny", messages=talk, max_tokens=5)
    assert answer.usage.completion_tokens == 5
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(**asked | {"model": "other"})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**asked | {"prompt": ""} | {"max_tokens": -1})


def test_a_prompt_that_comes_again_is_found_where_it_was(client):
    assert_prompts_are_found_again(client, "Story")


def test_an_application_that_was_deleted_leaves_nothing_in_the_way(client):
    """Ray's tree of prefixes outlives it, and names its replicas once the new ones got more than they."""
    for text in ("One short text for the one", "And for the other another"):
        client.completions.create(model="tiny", prompt=text, max_tokens=1)
    serve.delete("default")
    deploy()
    assert_prompts_are_found_again(client, "Tale")


def assert_prompts_are_found_again(client, kind: str) -> None:
    for i in range(4):
        text = f"{kind} {i}. " + f"It was the {i}th of many long days at sea. " * 12
        cached = []
        for _ in range(3):
            usage = client.completions.create(model="tiny", prompt=text, max_tokens=1).usage
            cached.append(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens)
        assert cached[0] < 0.2
        assert min(cached[1:]) > 0.8


def test_who_goes_is_cancelled(client):
    asked = {"model": "tiny", "prompt": "On and on", "max_tokens": 3500, "stream": True}
    stream = client.completions.create(**asked, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()

    def cancelled() -> float:
        pages = [client.get("/../metrics", cast_to=str) for _ in range(4)]  # of one replica or the other
        lines = [line for page in pages for line in page.splitlines() if 'status="cancelled"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    wait_for(cancelled, "the request is cancelled", every_s=0.2)


@pytest.mark.parametrize("what", [REPLICA, ENGINE])
def test_requests_of_a_killed_replica_are_sent_elsewhere_or_told(client, url, what):
    load, killed = Load(url), []
    asyncio.run(load.during(lambda: killed.append(kill_one(what))))
    assert set(load.ended) <= {"whole", "told"}, load.ended
    assert load.ended["told"] <= 6  # those that were streaming there: at most one of each client
    assert len(load.texts) == 6  # who was not told got the same text as ever
    gone(killed[0])
    wait_for(lambda: len(pids_of(ENGINE)) == 2, "there are two engines again")
    again = Load(url)
    asyncio.run(again.during(lambda: None, before=6, after=6))
    assert set(again.ended) == {"whole"}


def test_a_rolling_update_under_load_drops_nothing(client, url):
    before, load = pids_of(REPLICA), Load(url)
    asyncio.run(load.during(partial(deploy, seats=SEATS + 1)))
    assert set(load.ended) == {"whole"}, load.ended
    assert not set(before) & set(pids_of(REPLICA))


def test_waiting_requests_bring_another_replica(client, url):
    scaling = {"upscale_delay_s": 1.0, "downscale_delay_s": 1.0, "target_ongoing_requests": 2}
    deploy(num_replicas=1, max_replicas=2, autoscaling=scaling)
    wait_for(lambda: len(pids_of(ENGINE)) == 1, "one engine is left")
    load = Load(url)
    asyncio.run(load.during(lambda: wait_for(lambda: len(pids_of(ENGINE)) == 2, "a second engine comes")))
    assert set(load.ended) == {"whole"}, load.ended
