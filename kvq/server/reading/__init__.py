"""Prompt readers: tokenizing and chat templates in separate processes, which can be ended at any time.

A template is a program that came with the model, and a tokenizer's time grows with the text. Neither may hold
up the event loop, another tenant's request, or the server's end.
"""

from kvq.server.reading.jobs import Setup
from kvq.server.reading.lane import Lane, Overran
from kvq.server.reading.readers import Readers

__all__ = ["Lane", "Overran", "Readers", "Setup"]
