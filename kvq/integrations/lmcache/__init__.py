"""LMCache serde `kvq`, which makes LMCache store and transfer kvq blocks with digests."""

from kvq.extras import require


def register() -> None:
    """Register the serde `kvq` for LMCache's configuration. Further calls do nothing.

    Raises:
        ConfigError: LMCache is not installed.
    """
    require("kvq.integrations.lmcache", ("lmcache",))
    from kvq.integrations.lmcache import serde

    serde.register()
