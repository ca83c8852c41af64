"""Hand-over: moves prefixes and running requests to another engine over a socket. No torch."""

from typing import TYPE_CHECKING, Any

from kvq.extras import HAND_OVER, require

if TYPE_CHECKING:  # msgspec is not needed without a hand-over
    from kvq.engine.handover.handover import HandOver


def make_hand_over(core: Any) -> "HandOver | None":
    """Return the hand-overs that the options of an `EngineCore` ask for, or None."""
    if core.config.hand_over_listen is None and core.config.hand_over_to is None:
        return None
    require("hand-over", HAND_OVER)
    from kvq.engine.handover.handover import HandOver

    return HandOver(core)
