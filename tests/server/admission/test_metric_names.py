"""A server's model has the names, and the chat template, that it was given."""

import asyncio

import pytest

from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.server.admission.bodies import ChatMessage
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.service import Service, describe
from kvq.server.http.problems import Problem
from kvq.server.reading import Readers, Setup
from tests.server.asgi import Client, service, tinys_prompts

TEMPLATE = "{% for message in messages %}King {{ message.content }}{% endfor %}"


@pytest.fixture
def named():
    """A service of a model with two names."""
    return Service(("short", "org/long"), service().remote, tinys_prompts())


def test_each_name_is_the_model_and_answers_have_the_first(named):
    for name in ("short", "org/long", None):
        named.check_model(name)
    with pytest.raises(Problem, match="no model 'tiny' here; this server has 'short', 'org/long'"):
        named.check_model("tiny")
    assert named.name == "short"
    assert [describe(named, 1, name)["id"] for name in named.names] == ["short", "org/long"]


def test_a_request_by_the_second_name_is_answered(named):
    status, _, answer = Client(named).post("/tokenize", {"model": "org/long", "prompt": "A cat"})
    assert (status, len(answer["tokens"]) > 0) == (200, True)
    assert Client(named).post("/tokenize", {"model": "other", "prompt": "A cat"})[0] == 404


def test_readers_use_the_template_that_was_given():
    folder = EMBEDDED["tiny"]
    tokenizer = load_tokenizer(folder, TEMPLATE)
    assert tokenizer.chat_template == TEMPLATE != load_tokenizer(folder).chat_template

    async def read():
        prompts = Prompts(Readers(Setup(folder=str(folder), chat_template=TEMPLATE)), tokenizer)
        try:
            await prompts.start()
            return list(await prompts.chat(([ChatMessage(role="user", content="Lear")], {})))
        finally:
            prompts.close()

    assert tokenizer.decode(asyncio.run(read())) == "King Lear"
