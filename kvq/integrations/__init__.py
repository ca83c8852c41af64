"""Integrations with the engines and caches of other projects; imported by these projects, never by kvq."""
