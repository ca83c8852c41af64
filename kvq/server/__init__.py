"""Server: an HTTP process and an engine process, which exchange MessagePack messages over a socket pair."""
