"""Engine process, and the client of it in the HTTP process."""
