"""What commands say on standard error, apart from which model they loaded and how far they are."""

import re

_USUAL = re.compile(r"kvq: (model .*, digest [0-9a-f]{12}|.* (so far|left|known yet)|.*: done in .*)")


def remarks(err: str) -> list[str]:
    """The other lines. A busy machine gets lines about progress where a quiet one gets none."""
    return [line for line in err.splitlines() if not _USUAL.fullmatch(line)]
