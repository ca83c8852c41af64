"""What searches and calibrations share."""

from tests.long_texts import long_texts  # noqa: F401
