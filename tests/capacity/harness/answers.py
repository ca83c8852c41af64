"""What the fake models say: keys from what is seen, tokens from keys. Pure functions."""

VOCABULARY = 61  # tokens that may be chosen


def attend(sums: list[int], token: int, position: int) -> int:
    """The key of a token that sees keys with these sums, per layer group: a number below 2**32."""
    return hash((*sums, token, position)) & 0xFFFFFFFF


def choose(key: int, rank: int = 0) -> int:
    """The token that follows a key; `rank` 1 is the second choice, and so on."""
    return (key + rank * 7) % VOCABULARY


def beam_picks(keys: list[int]) -> list[tuple[int, int]]:
    """How a beam search goes on from its branches' keys: (branch continued, next token) for each."""
    picks = []
    for i in range(len(keys)):
        mixed = hash((*keys, i))
        parent = i if mixed % 3 == 0 else mixed // 3 % len(keys)
        picks.append((parent, choose(keys[parent], i)))
    return picks
