"""Keys from browsers: what they ask for by themselves may carry one as a Basic password."""

import base64
import binascii

POLLED = "/pool"  # by every open page, four times a second
CHALLENGE = 'Basic realm="kvq: any name, an API key as the password", charset="UTF-8"'


def is_browsed(path: str) -> bool:
    """True for what a browser asks for by itself, where a key may come as a Basic password."""
    return path in ("/", POLLED) or path.startswith("/page/")


def basic_password(authorization: bytes) -> bytes:
    """The password of a `Basic` authorization header; empty if it is none."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
