"""Which sequences a manager has, and which of them may be used how."""

from collections.abc import Iterator

from kvq.blockmgr.sequence import Sequence
from kvq.blockmgr.tables import Work
from kvq.errors import ConfigError


class Register:
    """Live sequences in order of their start, and the refusal of every wrong use."""

    def __init__(self) -> None:
        self._live: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._live

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence in."""
        self._live[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go; nothing but reading it is allowed any more."""
        del self._live[sequence]
        sequence.ready = False

    def check_live(self, sequence: Sequence) -> None:
        """Raise ConfigError unless the sequence is one of these."""
        if sequence not in self._live:
            raise ConfigError("the sequence was freed, or is another manager's; start a new one")

    def check_ready(self, sequence: Sequence) -> None:
        """Raise ConfigError unless the sequence's blocks are there and trusted."""
        if sequence.ready and sequence in self._live:
            return
        self.check_live(sequence)
        if sequence.is_swapped:
            raise ConfigError("the sequence is swapped out; swap it in first")
        raise ConfigError(
            "the sequence was swapped in and its bytes are not confirmed; carry out the orders, then call "
            "recover(sequence, failed)"
        )

    def check_work(self, work: Work) -> None:
        """Raise ConfigError unless every sequence of an append is ready, comes once, and grows."""
        if len(dict(work)) != len(work):
            raise ConfigError("a sequence comes twice in one append; add its counts up")
        live = self._live
        for sequence, count in work:
            if not sequence.ready or sequence not in live:
                self.check_ready(sequence)
            if count < 0:
                raise ConfigError(f"can't append {count} tokens; truncate drops some")

    def check_committed(self, sequence: Sequence, verb: str) -> None:
        """Raise ConfigError unless the sequence is ready and every token of it is committed."""
        self.check_ready(sequence)
        if sequence.committed != sequence.length:
            raise ConfigError(
                f"can't {verb} a sequence with {sequence.length - sequence.committed} tokens that were "
                f"appended and not committed; commit or truncate them first"
            )

    def check_swapped(self, sequence: Sequence) -> None:
        """Raise ConfigError unless the sequence is swapped out."""
        self.check_live(sequence)
        if not sequence.is_swapped:
            raise ConfigError("the sequence is not swapped out, so it can't be swapped in")

    def check_restored(self, sequence: Sequence) -> None:
        """Raise ConfigError unless the sequence was just swapped in."""
        self.check_live(sequence)
        if sequence.ready or sequence.is_swapped:
            raise ConfigError("the sequence was not just swapped in, so there is nothing to recover")
