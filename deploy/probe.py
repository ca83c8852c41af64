#!/usr/bin/env -S python3 -I
"""Exit status 0 if the server in this container answers 200: `kvq-probe PATH [FILE OF KEYS]`.

Probes of orchestrators can't carry a secret, and every route but /health/live needs a key.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path


def main(path: str, keys: str | None = None, port: str = "8000") -> int:
    """Ask once."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if keys is not None:
        request.add_header("Authorization", f"Bearer {Path(keys).read_text(encoding='utf8').split()[0]}")
    try:
        with urllib.request.urlopen(request, timeout=4) as answer:
            return int(answer.status != 200)
    except urllib.error.HTTPError as error:
        print(error.read(1000).decode(errors="replace"), file=sys.stderr)
    except OSError as error:
        print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
