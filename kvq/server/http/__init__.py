"""HTTP edge: listener, protocol, limits on requests, JSON, access and error answers."""
