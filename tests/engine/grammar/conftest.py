"""The embedded model's tokenizer behind one compiler; its logits are 32 ids wider than it."""

import pytest

from kvq.engine.grammar.compiler import GrammarCompiler

VOCAB_SIZE = 4128


@pytest.fixture(scope="session")
def compiler(tiny):
    compiler = GrammarCompiler(tiny.tokenizer, VOCAB_SIZE, eos_ids=[tiny.tokenizer.eos_token_id])
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return tiny.tokenizer
