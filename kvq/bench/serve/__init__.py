"""Server under load, over HTTP."""
