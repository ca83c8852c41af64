"""Forward passes: packed steps, sessions, and the texts of prompts."""
