"""Version of kvq."""

__version__ = "0.1.0"
