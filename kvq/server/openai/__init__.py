"""OpenAI's protocol: routes of chat and completions, their answers, and the document of all routes."""
