"""kvq inside other projects' engines and caches: each is imported by the one that it is for, never by kvq."""
