"""Retrieval: many facts planted in one long text, each asked for behind the same prefix."""

import random
import re
from dataclasses import dataclass
from typing import Any

import kvq
from benchmarks.real.asking import answers, asked
from benchmarks.real.bench import Bench
from benchmarks.real.closeness import in_format, sizes
from benchmarks.real.humaneval import shares
from benchmarks.real.records import Settings
from kvq.errors import RequestError
from kvq.evals.text import text_ids
from kvq.evals.watch import Progress

_ADJECTIVES = (
    "amber", "bitter", "copper", "dusty", "early", "faded", "gentle", "hollow", "iron", "jolly",
    "keen", "lonely", "marble", "narrow", "olive", "patient", "quiet", "rusty", "silver", "tidy",
    "upper", "velvet", "wooden", "yellow", "zealous",
)  # fmt: skip
_NOUNS = (
    "anchor", "basket", "candle", "drawer", "engine", "fountain", "garden", "hammer", "island", "jacket",
    "kettle", "ladder", "mirror", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "tunnel",
    "umbrella", "valley", "window", "yard", "zipper",
)  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
_NUMBER = re.compile(r"\d+")
_NEW_TOKENS = 16
_SPARE = 32  # tokens, for what cuts differently in a whole text
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Fact:
    """A thing and its number."""

    thing: str
    number: str

    @property
    def begun(self) -> str:
        """The sentence up to its number."""
        return f"The access code of the {self.thing} is"

    @property
    def question(self) -> str:
        """Question at the end of the prompt."""
        return f"What is the access code of the {self.thing}?"


def draw_facts(count: int, seed: int) -> list[Fact]:
    """Facts about different things with different numbers of five digits; the same for the same seed.

    Raises:
        RequestError: more than there are names for.
    """
    things = [f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    if not 1 <= count <= len(things):
        raise RequestError(f"1 to {len(things)} facts can be planted, got {count}")
    draw = random.Random(seed)
    numbers = draw.sample(range(10_000, 100_000), count)
    return [
        Fact(thing, str(number)) for thing, number in zip(draw.sample(things, count), numbers, strict=True)
    ]


def planted(text: str, facts: list[Fact], tokenizer: Any, tokens: int) -> str:
    """The beginning of a text with facts between its sentences, evenly; at most so many tokens.

    Raises:
        RequestError: the text is too short, or the facts alone too long.
    """
    told = [f"{fact.begun} {fact.number}." for fact in facts]
    room = tokens - len(text_ids(tokenizer, " ".join(told))) - len(told)
    sentences: list[str] = []
    for sentence in _SENTENCE_END.split(text):
        room -= len(text_ids(tokenizer, f" {sentence}"))
        if room < 0:
            break
        sentences.append(sentence)
    if room >= 0 or len(sentences) < len(facts):
        raise RequestError(
            f"{len(facts)} facts can't be planted in {tokens} tokens of this text; ask for fewer, or for "
            f"{'less' if room >= 0 else 'more'} text"
        )
    places = {round((i + 0.5) * len(sentences) / len(facts)): fact for i, fact in enumerate(told)}
    whole: list[str] = []
    for index, sentence in enumerate(sentences):
        whole += [places[index], sentence] if index in places else [sentence]
    return " ".join(whole)


def prompts(tokenizer: Any, text: str, facts: list[Fact], context: int) -> list[list[int]]:
    """Token ids of a prompt for each fact: all of the same text, then the question; answers fit, too."""
    longest = max(len(asked(tokenizer, fact.question, fact.begun)) for fact in facts)
    around = planted(text, facts, tokenizer, context - longest - _NEW_TOKENS - _SPARE)
    found = [asked(tokenizer, f"{around}\n\n{fact.question}", fact.begun) for fact in facts]
    assert max(map(len, found)) + _NEW_TOKENS <= context, "a prompt and its answer fit into the context"
    return found


def hits(text: str, fact: Fact) -> bool:
    """True if the first number of an answer is the fact's."""
    found = _NUMBER.search(text.replace(",", ""))
    return found is not None and found[0] == fact.number


def measure(bench: Bench, kv: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Ask for every fact; prompts share a prefix, whose blocks are written once and forked."""
    facts = draw_facts(settings["facts"], settings["seed"])
    ids = prompts(bench.prepared.tokenizer, bench.lab.essays().text, facts, settings["context"])
    model = in_format(bench.model, kv)
    params = kvq.SamplingParams(max_tokens=_NEW_TOKENS, stop=("\n", "."))
    outputs = answers(model, ids, params, at_once=_AT_ONCE, progress=progress, first_alone=True)
    right = [hits(output.outputs[0].text, fact) for output, fact in zip(outputs, facts, strict=True)]
    return {
        **sizes(model),
        **shares(right),
        "prompt_tokens": max(map(len, ids)),
        "cached_tokens_least": min((one.receipt.cached_tokens for one in outputs[1:]), default=0),
    }
