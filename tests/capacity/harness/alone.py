"""What a request must generate: the fake model's answers for it alone, without a cache, computed directly."""

from array import array
from collections.abc import Iterator

from kvq.scheduler import Request
from tests.capacity.harness.answers import attend, beam_picks, choose
from tests.capacity.harness.workload import SimulatedRequest


class Context:
    """Tokens and the key of the last one."""

    def __init__(self, windows: list[int | None], tokens: "array[int]") -> None:
        self._windows = windows
        self._keys: list[int] = []
        self._sums = [0] * len(windows)
        for token in tokens:
            self.append(token)

    @property
    def key(self) -> int:
        """What the next token is chosen by."""
        return self._keys[-1]

    def append(self, token: int) -> None:
        """Go on with a token."""
        position = len(self._keys)
        key = attend(self._sums, token, position)
        self._keys.append(key)
        for group, window in enumerate(self._windows):
            self._sums[group] += key
            if window is not None and position + 1 >= window:
                self._sums[group] -= self._keys[position + 1 - window]

    def copy(self) -> "Context":
        """A second one that goes its own way."""
        twin = Context(self._windows, array("I"))
        twin._keys, twin._sums = self._keys[:], self._sums[:]
        return twin


def check_tokens(request: Request, job: SimulatedRequest, windows: list[int | None]) -> None:
    """Raise AssertionError unless all tokens of all branches so far are what the request alone gets."""
    found = [list(branch.tokens[request.prompt_length :]) for branch in request.branches]
    if not any(found):
        return
    prompt = Context(windows, request.tokens)
    if job.is_beam_search:
        expected = _beams(prompt, len(found), len(found[0]))
    else:
        expected = [list(_tokens(prompt, i, len(tokens))) for i, tokens in enumerate(found)]
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got == want, f"request {request.id}, branch {i} generated {got}, alone it gets {want}"


def _tokens(prompt: Context, rank: int, count: int) -> Iterator[int]:
    """The tokens of one branch: its first is the prompt's choice of that rank."""
    context = prompt.copy()
    for number in range(count):
        token = choose(context.key, rank if number == 0 else 0)
        yield token
        context.append(token)


def _beams(prompt: Context, width: int, count: int) -> list[list[int]]:
    """The tokens of every branch after `count` rounds."""
    beams: list[tuple[Context, list[int]]] = []
    for i in range(width):
        token = choose(prompt.key, i)
        context = prompt.copy()
        context.append(token)
        beams.append((context, [token]))
    for _ in range(count - 1):
        after = []
        for parent, token in beam_picks([context.key for context, _ in beams]):
            context = beams[parent][0].copy()
            context.append(token)
            after.append((context, [*beams[parent][1], token]))
        beams = after
    return [tokens for _, tokens in beams]
