"""Ollama's API: `POST /api/generate` and `/api/chat`, and the routes that its clients ask before."""
