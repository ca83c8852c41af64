"""Watermarks for generated text: the schemes, the secret key and the detection test. Without torch.

`kvq/engine/sampling/watermarks.py` applies a watermark to a step's logits.
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
    "SCHEMES", "Detection", "Green", "Key", "Scheme", "Tournament", "detect", "make_key", "parse_scheme",
    "read_key",
]  # fmt: skip
