"""How many blocks of every pool a tenant may own."""

from kvq.blockmgr.pool import Account
from kvq.errors import ConfigError


class Quotas:
    """The accounts of tenants that have a quota, one per layer group."""

    def __init__(self, num_pools: int) -> None:
        self.accounts: dict[str, list[Account]] = {}
        self._num_pools = num_pools

    def of(self, tenant: str) -> list[Account] | None:
        """A tenant's accounts; None without a quota."""
        return self.accounts.get(tenant)

    def set(self, tenant: str, blocks: int) -> None:
        """Limit a tenant; its sequences that live already and had no quota go on without.

        Raises:
            ConfigError: less than one block.
        """
        if not isinstance(blocks, int) or blocks < 1:
            raise ConfigError(f"a quota must be a number of at least one block, got {blocks!r}")
        if tenant not in self.accounts:
            self.accounts[tenant] = [Account(quota=blocks) for _ in range(self._num_pools)]
        for account in self.accounts[tenant]:
            account.quota = blocks
