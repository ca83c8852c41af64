"""Prompt readers: separate processes that tokenize, render chat templates, and can be killed at any time.

Templates are programs supplied with the model, and tokenizing takes longer for longer texts. Neither may
block the event loop, delay another tenant's request, or delay the server's shutdown.
"""

from kvq.server.reading.jobs import Setup
from kvq.server.reading.lane import Lane, Overran
from kvq.server.reading.readers import Readers

__all__ = ["Lane", "Overran", "Readers", "Setup"]
