"""Tokenizing and chat templates in processes of their own, which can be ended whatever they do.

A template is a program that came with the model, and a tokenizer's time grows with what somebody sends.
Neither may hold the event loop, another tenant's request, or the server's end.
"""

from kvq.server.reading.jobs import Setup
from kvq.server.reading.lane import Lane, Overran
from kvq.server.reading.readers import Readers

__all__ = ["Lane", "Overran", "Readers", "Setup"]
