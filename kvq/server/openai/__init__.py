"""OpenAI's protocol: routes of chat and completions, their answers, and the OpenAPI document."""
