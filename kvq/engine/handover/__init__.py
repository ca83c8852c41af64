"""Hand-over: moves prefixes and running requests to another engine over a socket. No torch."""
