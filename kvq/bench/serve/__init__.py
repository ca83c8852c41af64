"""Server benchmark: servers under load over HTTP."""
