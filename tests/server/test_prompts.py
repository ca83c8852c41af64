"""Prompts that can't become token ids, and those that take too long."""

import asyncio
from time import sleep

import pytest

from kvq.server.bodies import ChatMessage
from kvq.server.problems import Problem
from kvq.server.prompts import Prompts

TURN = [ChatMessage(role="user", content="a")]


class Tokenizer:
    """A word is a token; the template is the test's."""

    chat_template = "there is one"

    def __init__(self, template=lambda turns, **_: " ".join(turn["content"] for turn in turns), seconds=0.0):
        self.template, self.seconds = template, seconds

    def __call__(self, text, add_special_tokens):
        sleep(self.seconds)
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, turns, tokenize, **options):
        assert not tokenize
        return self.template(turns, **options)


def refuse(turns, **options):
    raise ValueError("roles must alternate")


def run(prompts, work):
    async def main():
        try:
            return await work(prompts)
        finally:
            prompts.close()

    return asyncio.run(main())


def test_a_chat_becomes_tokens():
    assert run(Prompts(Tokenizer()), lambda p: p.chat(TURN)) == [1]


def test_a_model_without_a_template_has_no_chats():
    tokenizer = Tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(Problem, match="no chat template; use /v1/completions") as refused:
        run(Prompts(tokenizer), lambda p: p.chat(TURN))
    assert refused.value.status == 400


def test_a_template_that_refuses_says_so_to_its_client():
    with pytest.raises(Problem, match="roles must alternate") as refused:
        run(Prompts(Tokenizer(refuse)), lambda p: p.chat(TURN))
    assert refused.value.status == 400


def test_what_takes_too_long_is_given_up_and_counts_as_waiting_until_then():
    prompts = Prompts(Tokenizer(seconds=0.5), deadline_s=0.1)

    async def work(prompts):
        asking = asyncio.create_task(prompts.tokenize("a b"))
        await asyncio.sleep(0.01)
        assert prompts.num_waiting == 1
        with pytest.raises(Problem, match="not tokenized within") as refused:
            await asking
        assert refused.value.status == 503
        assert prompts.num_waiting == 0

    run(prompts, work)


def test_a_text_longer_than_the_longest_tokens_that_fit_is_not_tokenized():
    tokenizer = Tokenizer(seconds=60)
    tokenizer.get_vocab = lambda: {"a": 0, "abc": 1}
    with pytest.raises(Problem, match="31 characters, which are more than the model's 10 tokens") as refused:
        run(Prompts(tokenizer, max_tokens=lambda: 10), lambda p: p.tokenize("a" * 31))
    assert refused.value.status == 400
    tokenizer.seconds = 0
    prompts = Prompts(tokenizer, max_tokens=lambda: 10)
    assert run(prompts, lambda p: p.tokenize("a" * 30)) == [30]
    assert run(prompts.aside(), lambda p: p.tokenize("a" * 31)) == [31]


def test_those_who_only_want_to_know_wait_in_a_line_of_their_own():
    prompts = Prompts(Tokenizer(seconds=0.05))
    aside = prompts.aside()

    async def work(aside):
        asking = [asyncio.create_task(aside.tokenize("a b")) for _ in range(80)]
        await asyncio.sleep(0)
        assert (aside.num_waiting, prompts.num_waiting) == (64, 0)
        assert await asyncio.wait_for(prompts.tokenize("a b"), 1) == [1, 1]
        for task in asking[64:]:
            with pytest.raises(Problem, match="64 texts wait already") as refused:
                await task
            assert refused.value.status == 503
        for task in asking[:64]:
            task.cancel()
        prompts.close()

    run(aside, work)
