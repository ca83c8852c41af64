"""Integrations of kvq into other projects' engines and caches; each project imports its own, kvq none."""
