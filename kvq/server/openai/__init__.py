"""OpenAI's protocol: chat and completions routes, their responses, and the OpenAPI document."""
