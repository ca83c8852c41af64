"""Headers that travel with blocks: JSON as kvq writes it, and a seal that tells of any change."""

import hashlib
import json
from typing import Any


def header_text(header: dict[str, Any]) -> str:
    """A header as it is written and sealed."""
    return json.dumps(header, sort_keys=True)


def seal(header: str) -> str:
    """SHA-256 of a header's text, in hex."""
    return hashlib.sha256(header.encode()).hexdigest()
