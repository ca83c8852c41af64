"""kvq as LMCache's codec: a serde `kvq`, by which its storage and transfers hold kvq blocks with digests."""

from kvq.extras import require


def register() -> None:
    """Let LMCache's configuration name the serde `kvq`. Again, nothing happens.

    Raises:
        ConfigError: LMCache is not installed.
    """
    require("kvq.integrations.lmcache", ("lmcache",))
    from kvq.integrations.lmcache import serde

    serde.register()
