"""Commands as people type them."""

import pytest

from kvq.cli import main
from tests.long_texts import long_texts  # noqa: F401


@pytest.fixture
def kvq(capsys):
    """Run a command: its exit status, output and errors."""

    def run(*arguments):
        try:
            main(list(map(str, arguments)))
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        said = capsys.readouterr()
        return status, said.out, said.err

    return run
