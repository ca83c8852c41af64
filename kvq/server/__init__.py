"""Server: an HTTP process and an engine process that exchange MessagePack over a socket pair."""
