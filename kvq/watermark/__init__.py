"""Watermarks of generated text and their detection: the schemes, the secret key, the test. No torch.

The effect of a watermark on a step's logits is in `kvq/engine/sampling/watermarks.py`.
"""

from typing import TYPE_CHECKING

from kvq.lazy import lazily

if TYPE_CHECKING:
    from kvq.watermark.detection import Detection, detect
    from kvq.watermark.key import Key, make_key, read_key
    from kvq.watermark.schemes import SCHEMES, Green, Scheme, Tournament, parse_scheme
else:
    __getattr__ = lazily(
        __name__,
        {
            "kvq.watermark.detection": ("Detection", "detect"),
            "kvq.watermark.key": ("Key", "make_key", "read_key"),
            "kvq.watermark.schemes": ("SCHEMES", "Green", "Scheme", "Tournament", "parse_scheme"),
        },
    )

__all__ = [
    "SCHEMES",
    "Detection",
    "Green",
    "Key",
    "Scheme",
    "Tournament",
    "detect",
    "make_key",
    "parse_scheme",
    "read_key",
]
