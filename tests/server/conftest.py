"""A server that several files of tests use one after the other."""

import pytest

from tests.server.kit import Server


@pytest.fixture(scope="session")
def common_server():
    """INT4, 128 blocks, 16 sequences, calls as Hermes writes them."""
    options = ("--kv", "int4", "--num-blocks", "128", "--max-num-seqs", "16", "--tool-call-parser", "hermes")
    with Server(*options) as running:
        yield running
