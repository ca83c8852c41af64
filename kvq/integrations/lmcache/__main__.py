"""`python -m kvq.integrations.lmcache ...`: LMCache's own command line with the serde `kvq`."""

import sys

from kvq.errors import KVQError
from kvq.integrations.lmcache import register


def main() -> None:
    """Register the serde, then run `lmcache` with the arguments of this command."""
    try:
        register()
    except KVQError as error:
        raise SystemExit(f"kvq: error: {error}") from None
    from lmcache.cli.main import main as run

    sys.argv[0] = "lmcache"
    run()


if __name__ == "__main__":
    main()
