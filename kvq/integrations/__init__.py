"""Integrations into other projects' engines and caches, imported by those projects, never by kvq."""
