"""HTTP edge: listeners, the protocol, limits on what arrives, JSON, access and error answers."""
