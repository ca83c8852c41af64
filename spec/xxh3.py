"""XXH3 of 128 and 64 bits, seed 0, of the lengths that blocks and the headers of segments have.

Source: Collet, xxHash 0.8, doc/xxhash_spec.md, "XXH3 algorithm for large inputs".
"""

import numpy as np

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_MASK = (1 << 64) - 1
_P32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = _P32[2], *_P64[:4], _P32[1], _P64[4], _P32[0]
_SWAPPED = [1, 0, 3, 2, 5, 4, 7, 6]


def _words(data: bytes, at: int, count: int) -> np.ndarray:
    return np.frombuffer(data, "<u8", count, at)


_KEYS = np.stack([_words(_SECRET, 8 * i, 8) for i in range(16)])


def _accumulate(acc: np.ndarray, stripes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Stripes and their keys, uint64 [n, 8]."""
    mixed = stripes ^ keys
    products = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
    return acc + stripes[:, _SWAPPED].sum(0, dtype=np.uint64) + products.sum(0, dtype=np.uint64)


def _merged(acc: np.ndarray, at: int, start: int) -> int:
    keys = _words(_SECRET, at, 8)
    for i in range(4):
        product = int(acc[2 * i] ^ keys[2 * i]) * int(acc[2 * i + 1] ^ keys[2 * i + 1])
        start += (product & _MASK) ^ (product >> 64)
    start &= _MASK
    start ^= start >> 37
    start = start * 0x165667919E3779F9 & _MASK
    return start ^ (start >> 32)


def xxh3_128(data: bytes) -> bytes:
    """The digest, 16 bytes, in its canonical order."""
    size = len(data)
    assert size > 240, "shorter inputs are hashed otherwise"
    acc = np.array(_START, np.uint64)
    blocks = (size - 1) // 1024
    for block in range(blocks):
        acc = _accumulate(acc, _words(data, 1024 * block, 128).reshape(16, 8), _KEYS)
        acc = (acc ^ (acc >> np.uint64(47)) ^ _words(_SECRET, 128, 8)) * np.uint64(_P32[0])
    stripes = (size - 1 - 1024 * blocks) // 64
    last = _words(data, 1024 * blocks, 8 * stripes).reshape(stripes, 8)
    acc = _accumulate(acc, last, _KEYS[:stripes])
    acc = _accumulate(acc, _words(data, size - 64, 8)[None], _words(_SECRET, 121, 8)[None])
    low = _merged(acc, 11, size * _P64[0] & _MASK)
    high = _merged(acc, 117, ~(size * _P64[1]) & _MASK)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _fold(data: bytes, at: int, key: int) -> int:
    words, keys = _words(data, at, 2), _words(_SECRET, key, 2)
    product = int(words[0] ^ keys[0]) * int(words[1] ^ keys[1])
    return (product & _MASK) ^ (product >> 64)


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def xxh3_64(data: bytes) -> bytes:
    """The digest of 64 bits, for 8 bytes, 17 to 128, or more than 240."""
    size = len(data)
    if size > 240:
        return xxh3_128(data)[8:]
    if size == 8:
        first, second = (int(word) for word in np.frombuffer(data, "<u4"))
        keys = _words(_SECRET, 8, 2)
        value = (second + (first << 32)) ^ int(keys[0] ^ keys[1])
        value = (value ^ _turned(value, 49) ^ _turned(value, 24)) * 0x9FB21C651E98DF25 & _MASK
        value = (value ^ ((value >> 35) + size)) * 0x9FB21C651E98DF25 & _MASK
        return (value ^ (value >> 28)).to_bytes(8, "big")
    assert 17 <= size <= 128, "other lengths are hashed otherwise"
    value = size * _P64[0]
    for i in reversed(range((size - 1) // 32 + 1)):
        value += _fold(data, 16 * i, 32 * i) + _fold(data, size - 16 * (i + 1), 32 * i + 16)
    value &= _MASK
    value = (value ^ (value >> 37)) * 0x165667919E3779F9 & _MASK
    return (value ^ (value >> 32)).to_bytes(8, "big")
