"""Text that can be tokenized."""

from kvq.errors import RequestError


def check_unicode(text: str, what: str) -> None:
    """Raise RequestError if `text` holds lone surrogates, as bytes that were not UTF-8 leave them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid Unicode at character {error.start}; give UTF-8 text"
        ) from error
