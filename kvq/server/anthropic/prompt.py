"""The tokens of a conversation, and which prefixes of them shall stay cached."""

from kvq.engine import PrefixPin
from kvq.server.anthropic.bodies import PromptBody
from kvq.server.anthropic.turns import breakpoints, conversation
from kvq.server.prompts import Prompts


async def prompt_tokens(prompts: Prompts, body: PromptBody, tenant: str) -> list[int]:
    """Token ids of the prompt.

    Raises:
        Problem: the model has no template, or its template refuses the conversation.
    """
    return await prompts.chat(conversation(body), tenant=tenant)


async def prompt_pins(prompts: Prompts, body: PromptBody, tokens: list[int], tenant: str) -> list[PrefixPin]:
    """What the body's breakpoints ask for.

    A prefix is what does not change if other text follows its last block, whatever the template makes of it.

    Raises:
        Problem: too many breakpoints, or the template takes too long.
    """
    found = breakpoints(body)
    if not found:
        return []
    others = [conversation(body, changed=block) for block, _ in found]
    lengths = await prompts.shared_lengths(tokens, conversation(body), others, tenant=tenant)
    return [
        PrefixPin(length=length, seconds=control.seconds)
        for length, (_, control) in zip(lengths, found, strict=True)
    ]
