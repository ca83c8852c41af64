"""Logit adjustments: penalties and the token counts that they need, biases, bans and grammar masks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvq.engine.device.transfers import upload

_SMALLEST_SPAN = 64  # tokens
Bias = tuple[Tensor, Tensor]  # tokens of a row, int64, and fp32 amounts to add to their logits; -inf forbids


def apply_penalties(
    logits: Tensor, places: Tensor, tokens: Tensor, counts: Tensor, strengths: Tensor
) -> None:
    """Penalize the logits of tokens that have already occurred, in place.

        logit = logit / r if logit > 0 else logit * r    tokens of the prompt and generated ones
        logit = logit - presence * (count > 0) - frequency * count

    `logits`: fp32, [rows, vocab]; `places`, `tokens`, `counts`: [tokens], the row and token of each penalized
    logit, and how often the token was generated; `strengths`: r, presence and frequency for each, fp32, [3,
    tokens]. Sources: Keskar et al. 2019 (CTRL), section 4.1; OpenAI's API reference.
    """
    repetition, presence, frequency = strengths
    old = logits[places, tokens]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - presence * (counts > 0) - frequency * counts
    logits[places, tokens] = new


def apply_biases(logits: Tensor, places: Sequence[int], biases: Sequence[Bias]) -> None:
    """Add `biases[i]` to row `places[i]` of the logits, in place. A row may occur more than once."""
    rows = upload(np.repeat(places, [len(tokens) for tokens, _ in biases]), logits.device)
    tokens, amounts = map(torch.cat, zip(*biases, strict=True))
    logits.index_put_((rows, tokens), amounts, accumulate=True)


def apply_masks(logits: Tensor, masks: dict[int, Tensor]) -> None:
    """Set the logits of tokens that a row's mask forbids to -inf, in place.

    `logits`: fp32, [rows, vocab]; `masks`: row -> int32, [ceil(vocab / 32)], on the host. Bit j of
    word w allows token 32 * w + j.
    """
    vocab_size = logits.shape[-1]
    given = torch.stack(list(masks.values())).numpy()
    words = upload(given, logits.device, torch.int32)  # [masks, words]
    assert words.shape[-1] == -(-vocab_size // 32), (
        f"a mask of {vocab_size} tokens has {-(-vocab_size // 32)} words, got {words.shape[-1]}"
    )
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (words[:, :, None] >> shifts & 1) == 0  # [masks, words, 32]
    forbidden = forbidden.flatten(1)[:, :vocab_size]
    rows = upload(list(masks), logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


@dataclass(slots=True)
class _Span:
    """Range of the arena used by one row; `counts` lists the row's tokens in the arena's order."""

    start: int
    capacity: int
    counts: dict[int, int]
    slots: dict[int, int] = field(init=False)  # token -> offset within the span

    def __post_init__(self) -> None:
        self.slots = {token: offset for offset, token in enumerate(self.counts)}


class TokenCounts:
    """Each row's unique tokens and their counts, stored in one arena on the device.

    arena:  | row 3: 64 | row 0: 256           | row 7: 64 | released: 128 |

    The length of a span is a power of two; a row that fills its span moves to a span twice as long, and
    released spans are reused by rows of the same length. Memory is thus proportional to the tokens seen, not
    to the vocabulary, and a token is written twice on average. Tokens recorded between two reads are sent to
    the device together.
    """

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, dtype=torch.float32, device=device)  # whole numbers
        self._spans: dict[int, _Span] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # capacity -> starts
        self._end = 0
        self._unwritten: dict[int, tuple[int, int]] = {}  # position in the arena -> token, count

    def __contains__(self, row: int) -> bool:
        return row in self._spans

    def add(self, row: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Start a row. Prompt tokens have a count of 0 unless they were also generated."""
        counts = dict.fromkeys(prompt, 0)
        for token in generated:
            counts[token] = counts.get(token, 0) + 1
        capacity = max(_SMALLEST_SPAN, 1 << len(counts).bit_length())
        self._spans[row] = self._write(_Span(self._take(capacity), capacity, counts))

    def remove(self, row: int) -> None:
        """Remove a row and release its span."""
        self._flush()  # pending writes must not reach the span's next owner
        span = self._spans.pop(row)
        self._free[span.capacity].append(span.start)

    def record(self, row: int, token: int) -> None:
        """Count a token generated by the row."""
        span = self._spans[row]
        if token not in span.slots:
            if len(span.slots) == span.capacity:
                span = self._moved(row)
            span.slots[token] = len(span.slots)
        span.counts[token] = span.counts.get(token, 0) + 1
        self._unwritten[span.start + span.slots[token]] = (token, span.counts[token])

    def read(
        self, rows: Sequence[int], ahead: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each token of `rows`, its row's index in `rows`, its id and its count; [tokens] each.

        Indices and ids are int64, counts fp32. A row may occur several times; `ahead`: for each index, tokens
        that count as if they had been recorded.
        """
        self._flush()
        device = self._tokens.device
        lengths = [len(self._spans[row].slots) for row in rows]
        shifts, total = [], 0  # from a token's position in the result to its position in the arena
        for row, length in zip(rows, lengths, strict=True):
            shifts.append(self._spans[row].start - total)
            total += length
        bounds = upload([lengths, shifts], device)
        places = torch.arange(len(rows), device=device).repeat_interleave(bounds[0], output_size=total)
        index = torch.arange(total, device=device) + bounds[1][places]
        tokens, counts = self._tokens[index], self._counts[index]
        return (
            (places, tokens, counts) if ahead is None else self._joined(rows, ahead, places, tokens, counts)
        )

    def _joined(
        self,
        rows: Sequence[int],
        ahead: Sequence[Sequence[int]],
        places: Tensor,
        tokens: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and counts with the tokens in `ahead` added."""
        first, known, new = 0, [], []
        for place, (row, coming) in enumerate(zip(rows, ahead, strict=True)):
            slots = self._spans[row].slots
            for token, count in Counter(coming).items():
                if token in slots:
                    known.append((first + slots[token], count))
                else:
                    new.append((place, token, count))
            first += len(slots)
        if known:
            index, more = upload(list(zip(*known, strict=True)), counts.device)
            counts[index] += more
        if new:
            added = upload(list(zip(*new, strict=True)), counts.device)
            places, tokens = torch.cat((places, added[0])), torch.cat((tokens, added[1]))
            counts = torch.cat((counts, added[2].float()))
        return places, tokens, counts

    def _moved(self, row: int) -> _Span:
        """Move a row to a span twice as long, and return the new span."""
        old = self._spans[row]
        self.remove(row)
        capacity = 2 * old.capacity
        self._spans[row] = self._write(_Span(self._take(capacity), capacity, old.counts))
        return self._spans[row]

    def _take(self, capacity: int) -> int:
        """Return the start of a free span."""
        if self._free[capacity]:
            return self._free[capacity].pop()
        start, self._end = self._end, self._end + capacity
        missing = self._end - len(self._tokens)
        if missing > 0:
            room = max(missing, len(self._tokens))  # at least double it, for amortized cost
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(room)))
            self._counts = torch.cat((self._counts, self._counts.new_zeros(room)))
        return start

    def _write(self, span: _Span) -> _Span:
        """Write an entire span to the arena."""
        place = slice(span.start, span.start + len(span.counts))
        self._tokens[place], self._counts[place] = upload(
            [[*span.counts], [*span.counts.values()]], self._tokens.device
        )
        return span

    def _flush(self) -> None:
        if not self._unwritten:
            return
        places, entries = list(self._unwritten), list(self._unwritten.values())
        tokens, counts = zip(*entries, strict=True)
        written = upload([places, tokens, counts], self._tokens.device)  # [3, tokens]
        self._tokens[written[0]] = written[1]
        self._counts[written[0]] = written[2].float()
        self._unwritten.clear()
