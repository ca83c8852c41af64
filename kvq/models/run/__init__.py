"""Forward passes: packed steps, sessions, and prompt encoding."""
