"""Anthropic's turns as the turns of a chat template, and what lies behind their breakpoints."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from kvq.server.anthropic.bodies import CacheControl, Marked, Message, PromptBody, TextBlock
from kvq.server.bodies import ChatMessage
from kvq.server.problems import Problem
from kvq.server.prompts import Conversation

MAX_BREAKPOINTS = 4
_OTHER = "\ue000"  # for private use: nobody's text goes on with it


def conversation(body: PromptBody, changed: Marked | None = None) -> Conversation:
    """What the model's template is given.

    Turns of one role after another are one turn, as Anthropic has it: templates want roles to alternate.
    A last turn of the assistant is continued. `changed`: a block behind which other text is to follow.

    Raises:
        Problem: the assistant's last turn ends in white space.
    """
    messages = []
    if body.system:
        messages.append(ChatMessage(role="system", content=_text(body.system, changed)))
    for role, turns in groupby(body.messages, key=lambda message: message.role):
        parts = [_text(turn.content, changed) for turn in turns]
        messages.append(ChatMessage(role=role, content="\n\n".join(parts)))
    return Conversation(messages=messages, options=_ending(body.messages[-1]))


def breakpoints(body: PromptBody) -> list[tuple[Marked, CacheControl]]:
    """The blocks that breakpoints lie behind.

    Raises:
        Problem: too many of them.
    """
    blocks: list[Marked] = [*body.system, *(block for message in body.messages for block in message.content)]
    found = [(block, block.cache_control) for block in blocks if block.cache_control is not None]
    if body.cache_control is not None and blocks and blocks[-1].cache_control is None:
        found.append((blocks[-1], body.cache_control))
    if len(found) > MAX_BREAKPOINTS:
        raise Problem(400, f"cache_control may stand {MAX_BREAKPOINTS} times, it stands {len(found)} times")
    return found


def _ending(last: Message) -> dict[str, Any]:
    if last.role == "user":
        return {"add_generation_prompt": True}
    text = _text(last.content, None)
    if not text or text[-1].isspace():
        raise Problem(400, "the assistant's last turn is continued: it can't be empty or end in white space")
    return {"continue_final_message": True}


def _text(blocks: Sequence[TextBlock], changed: Marked | None) -> str:
    return "".join(block.text + (_OTHER if block is changed else "") for block in blocks)
