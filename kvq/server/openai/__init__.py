"""OpenAI's protocol: chat, completions, their answers and the document of all routes."""
