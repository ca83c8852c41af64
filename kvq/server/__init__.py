"""The server: an HTTP process and an engine process that speak MessagePack over a socket pair."""
