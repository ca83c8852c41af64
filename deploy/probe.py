#!/usr/bin/env -S python3 -I
"""Exit status 0 if the server in this container answers 200: `kvq-probe PATH [FILE OF KEYS]`.

KVQ_PROBE_URL tells where it listens, if not on http://127.0.0.1:8000. Over HTTPS its certificate is not
looked at: it names the service and not this container.

Probes of orchestrators can't carry a secret, and every route but /health/live needs a key. The keys of the
file are tried in turn: one that was just written there counts once the server has read it again (SIGHUP).
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path


def main(path: str, keys: str | None = None) -> int:
    """Ask once, or with one key after the other while the server does not know them."""
    url = os.environ.get("KVQ_PROBE_URL", "http://127.0.0.1:8000")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        for key in [None] if keys is None else read_keys(keys):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            request = urllib.request.Request(url + path, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=4, context=context) as answer:
                    return int(answer.status != 200)
            except urllib.error.HTTPError as error:
                print(error.read(1000).decode(errors="replace"), file=sys.stderr)
                if error.code != 401:
                    return 1
    except OSError as error:
        print(error, file=sys.stderr)
    return 1


def read_keys(path: str) -> list[str]:
    """As the server reads them: one a line, comments passed over."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
