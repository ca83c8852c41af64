"""Engine process, and its client in the HTTP process."""
