"""Engine process, and the client in the HTTP process that talks to it."""
