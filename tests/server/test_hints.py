"""Sessions and hints over HTTP, and KV that outlives the server's engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.kit import started
