"""Prompts that can't become token ids, and those that take too long."""

import asyncio
import threading

import pytest

from kvq.server.bodies import ChatMessage
from kvq.server.problems import Problem
from kvq.server.prompts import Prompts
from tests.waiting import HANG_S

TURN = [ChatMessage(role="user", content="a")]


class Tokenizer:
    """A word is a token; the template is the test's. What begins with "slow" waits until it may go on."""

    chat_template = "there is one"

    def __init__(self, template=lambda turns, **_: " ".join(turn["content"] for turn in turns)):
        self.template, self.may_go_on, self.num_texts = template, threading.Event(), 0

    def __call__(self, text, add_special_tokens):
        self.num_texts += 1
        if text.startswith("slow"):
            assert self.may_go_on.wait(HANG_S)
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
    tokenizer = Tokenizer()
    prompts = Prompts(tokenizer, deadline_s=0.1)

    async def work(prompts):
        asking = asyncio.create_task(prompts.tokenize("slow"))
        await asyncio.sleep(0)
        assert prompts.num_waiting == 1
        with pytest.raises(Problem, match="not tokenized within") as refused:
            await asking
        assert refused.value.status == 503
        assert prompts.num_waiting == 0
        tokenizer.may_go_on.set()

    run(prompts, work)


def test_a_text_longer_than_the_longest_tokens_that_fit_is_not_tokenized():
    tokenizer = Tokenizer()
    tokenizer.get_vocab = lambda: {"a": 0, "abc": 1}
    with pytest.raises(Problem, match="31 characters, which are more than the model's 10 tokens") as refused:
        run(Prompts(tokenizer, max_tokens=lambda: 10), lambda p: p.tokenize("a" * 31))
    assert refused.value.status == 400
    assert tokenizer.num_texts == 0
    prompts = Prompts(tokenizer, max_tokens=lambda: 10)
    assert run(prompts, lambda p: p.tokenize("a" * 30)) == [30]
    assert run(prompts.aside(), lambda p: p.tokenize("a" * 31)) == [31]


def test_those_who_only_want_to_know_wait_in_a_line_of_their_own():
    tokenizer = Tokenizer()
    prompts = Prompts(tokenizer)
    aside = prompts.aside()

    async def work(aside):
        asking = [asyncio.create_task(aside.tokenize("slow")) for _ in range(80)]
        await asyncio.sleep(0)
        assert (aside.num_waiting, prompts.num_waiting) == (64, 0)
        assert await prompts.tokenize("a b") == [1, 1]
        for task in asking[64:]:
            with pytest.raises(Problem, match="64 texts wait already") as refused:
                await task
            assert refused.value.status == 503
        for task in asking[:64]:
            task.cancel()
        tokenizer.may_go_on.set()
        prompts.close()

    run(aside, work)
