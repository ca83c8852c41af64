"""Where LMCache is not installed."""

import subprocess
import sys

import pytest

from kvq import extras
from kvq.errors import ConfigError
from kvq.integrations.lmcache import register


def test_there_is_a_remedy(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "lmcache")
    with pytest.raises(ConfigError, match=r"needs lmcache, .* pip install '\.\[lmcache\]'"):
        register()


@pytest.mark.skipif(extras.is_installed("lmcache"), reason="LMCache is installed")
def test_its_command_line_says_so_in_one_line():
    line = [sys.executable, "-m", "kvq.integrations.lmcache", "--help"]
    run = subprocess.run(line, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("kvq: error: kvq.integrations.lmcache needs lmcache")
