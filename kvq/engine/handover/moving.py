"""Moving sequences: the blocks of prefixes and requests that leave an engine or come to it.

Each block is checked on arrival. The receiver reads a message only once the blocks of the previous one are
stored, so the socket's buffers limit what is under way.
"""

from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from kvq.blockmgr import PrefixQuery, Sequence
from kvq.blockmgr.prefix import TOKEN_BYTES
from kvq.cache.digests import digest_context, layout_digest
from kvq.engine.exactness import engine_facts
from kvq.engine.handover.link import Answer, Begin, Block, Blocks, Link, block_digest, block_names
from kvq.engine.requests.outputs import Event
from kvq.engine.requests.request_options import RequestOptions, check_known
from kvq.engine.requests.request_state import Job
from kvq.errors import EngineError, OutOfBlocks, RequestError
from kvq.scheduler import Branch
from kvq.scheduler.request import RequestState

Place = tuple[int, int]  # layer group, index in the sequence
PIECE = 2 << 20  # bytes of blocks in one message, unless one block has more


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Sizes and meaning of an engine's blocks, by layer group."""

    block_size: int  # tokens
    block_bytes: list[int]
    contexts: list[bytes]  # digests of layout and recipe


def send_blocks(
    link: Link, begin: Begin, places: list[Place], shape: _Shape, read: Callable[[list[Place]], list[Any]]
) -> int:
    """Send a sequence, and return how many of its tokens the peer took over. `read`: returns blocks' bytes.

    Raises:
        EngineError: the peer refused, or ended the connection.
        OSError: the connection broke, or the peer is silent.
    """
    link.send(begin)
    names, pieces = block_names(begin.tokens, shape.block_size), list[list[Place]]()
    for group, size in enumerate(shape.block_bytes) if link.expect(Answer).tokens else ():
        own, some = [place for place in places if place[0] == group], max(1, PIECE // size)
        pieces += [own[at : at + some] for at in range(0, len(own), some)]
    for number, piece in enumerate(pieces or [[]], 1):
        blocks = []
        for (group, index), content in zip(piece, read(piece) if piece else [], strict=True):
            digest = block_digest(shape.contexts[group], names[index], (group, index), content)
            blocks.append((group, index, digest, content))
        link.send(Blocks(blocks, are_last=number >= len(pieces)))
    return link.expect(Answer).tokens


def receive_blocks(
    link: Link, begin: Begin, places: list[Place], shape: _Shape, put: Callable[[list[Block]], object]
) -> None:
    """Receive the blocks for these places, and pass them on to `put`, a message at a time.

    Raises:
        EngineError: a block is damaged, belongs elsewhere or is missing, or the connection has ended.
        OSError: the connection broke, or the peer is silent.
    """
    link.send(Answer(begin.length if places else 0))
    names, missing, are_last = block_names(begin.tokens, shape.block_size), set(places), False
    while not are_last:
        message = link.expect(Blocks)
        for group, index, digest, content in message.blocks:
            what = f"block {index} of layer group {group}"
            if (group, index) not in missing:
                link.refuse(f"{what} is not wanted, or comes twice")
            if len(content) != shape.block_bytes[group]:
                link.refuse(f"{what} has {len(content)} bytes")
            if digest != block_digest(shape.contexts[group], names[index], (group, index), content):
                link.refuse(f"{what} is damaged, or belongs elsewhere")
            missing.remove((group, index))
        put(message.blocks)
        are_last = message.are_last
    if missing:
        link.refuse(f"{len(missing)} blocks are missing")


@dataclass(slots=True, eq=False)
class Moving:
    """Tokens and blocks that go to another engine or come from one."""

    begin: Begin
    kv: Sequence | None  # None: there are no blocks, or a request in the queues has them
    job: Job | None = None  # None: a prefix


class MovingBlocks:
    """Blocks of one engine that move. All methods are for the engine's thread, between two steps."""

    def __init__(self, core: Any) -> None:
        """`core`: the `EngineCore` that owns the blocks."""
        self._core, self._scheduler, self._manager = core, core.scheduler, core.scheduler.manager

    def hold(self, tokens: "array[int]", options: RequestOptions) -> Moving:
        """Hold a prompt's cached prefix, so that it is not evicted."""
        length, _, _ = self._manager.prefixes.held(self._prompt(tokens, options))
        if not length:
            raise RequestError("no whole block of this prompt is cached; run the prompt first")
        self.carry_out()
        restore = self._manager.below.restore(self._prompt(tokens[:length], options), length)
        self._manager.below.end(restore, is_complete=True)
        self._scheduler.num_away += 1
        return Moving(Begin(tokens[:length].tobytes(), length, options), restore.sequence)

    def places(self, sequence: Sequence | None) -> list[Place]:
        """Return the places of the blocks that a token after the sequence needs."""
        blocks, found = self._manager.blocks, list[Place]()
        for group, table in enumerate([] if sequence is None else sequence.tables):
            assert sequence is not None, "it has tables"
            found += [(group, i) for i in range(blocks.first_seen(group, sequence.length), len(table))]
        return found

    def read(self, sequence: Sequence, some: list[Place]) -> list[Any]:
        """Return the bytes of blocks as buffers."""
        if not sequence.num_held:
            raise EngineError("the blocks are gone")
        cache = self._core.runner.cache
        return [cache.read_block(group, sequence.tables[group][i]).numpy().data for group, i in some]

    def arrive(self, begin: Begin, listener: Callable[[Event], object]) -> Moving:
        """Make room for a sequence. Raise KVQError if it can't be taken."""
        tokens, job, sequence = unpack(begin), None, None
        check_known(tokens, self._core.model.geometry.vocab_size)
        prompt = self._prompt(tokens, begin.options)
        if begin.prompt_length:
            job = self._core.intake.new_job(tokens[: begin.prompt_length], begin.options, listener=listener)
            job.seed = begin.seed
            with suppress(OutOfBlocks):
                if begin.length:
                    sequence = self._manager.below.take_over(prompt, begin.length)
                    sequence.indexing = self._core.config.prefix_caching
        elif self._manager.prefixes.held(prompt)[0] < begin.length:
            sequence = self._manager.adopt(prompt, begin.length)
        self._scheduler.num_away += sequence is not None
        self.carry_out()
        return Moving(begin, sequence, job)

    def put(self, arrival: Moving, blocks: list[Block]) -> None:
        """Store blocks that have arrived."""
        for group, index, _, content in blocks:
            assert arrival.kv is not None, "blocks are wanted"
            block = arrival.kv.tables[group][index]
            self._core.runner.cache.write_block(group, block, torch.frombuffer(content, dtype=torch.uint8))

    def drop(self, moving: Moving) -> None:
        """Free what is left of a sequence."""
        if moving.kv is not None:
            self._manager.free(moving.kv)
            self._scheduler.num_away -= 1
            moving.kv = None

    def take_over(self, job: Job, tokens: "array[int]", now: float) -> Branch:
        """Queue a request that another engine has begun. `tokens`: generated so far. Return its branch."""
        scheduler = self._scheduler
        job.make_branches(max_tokens=scheduler.check(job), now=now)
        job.branches[0].tokens.extend(tokens)
        job.admitted_s = now
        scheduler.counters.added += 1
        self.put_back(job, now)
        return job.branches[0]

    def detach(self, job: Job) -> None:
        """Take a request with one branch out of all queues, with its blocks, until `put_back`."""
        if job not in self._scheduler.running.requests:
            self._scheduler.waiting.remove(job)
        self._scheduler.running.detach(job)

    def put_back(self, job: Job, now: float) -> None:
        """Queue a request that was detached, before those that were never admitted."""
        job.state, job.preempted_s = RequestState.PREEMPTED, now
        self._scheduler.waiting.put_back(job)
        self._scheduler.nobody_fits = False

    def carry_out(self) -> None:
        """Carry out the orders of the block manager that wait for a step."""
        self._core.runner.cache.carry_out(self._manager.take_orders())

    def _prompt(self, tokens: "array[int]", options: RequestOptions) -> PrefixQuery:
        salts = {"shared_salt": options.shared_salt, "cache_salt": options.cache_salt}
        prompt: PrefixQuery = self._manager.prompt(tokens, tenant=options.tenant, **salts)
        return prompt


def unpack(begin: Begin) -> "array[int]":
    """Return the tokens of an announcement. Raise RequestError unless its numbers fit them."""
    if len(begin.tokens) % TOKEN_BYTES:
        raise RequestError("the tokens are cut")
    tokens = array("I", begin.tokens)
    if not (0 <= begin.length <= len(tokens) and 0 <= begin.prompt_length <= len(tokens)):
        raise RequestError(f"{begin.length} and {begin.prompt_length} of {len(tokens)} tokens")
    return tokens


def facts_of(core: Any) -> tuple[dict[str, str], _Shape]:
    """Return what another engine must have in common with this one, by name, and the blocks' sizes."""
    model, layout, marking = core.model, core.model.layout, core.intake.marking
    facts = engine_facts(model, marking)
    if not model.prepared.exact:
        key = None if marking is None else marking.key.word(b"hand-over", [])
        facts["program"] = "" if marking is None else f"{marking.mode} {marking.scheme} {key:016x}"
    facts |= {"recipe": model.recipe.digest(), "layout": layout_digest(layout)}
    contexts = [sha256(digest_context(group, layout.recipe)).digest() for group in layout.groups]
    sizes = [group.block_bytes for group in layout.groups]
    return facts, _Shape(block_size=layout.block_size, block_bytes=sizes, contexts=contexts)
