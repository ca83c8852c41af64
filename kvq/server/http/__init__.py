"""HTTP layer: listener, protocol, request limits, JSON, access control and error responses."""
