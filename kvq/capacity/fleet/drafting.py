"""Speculative drafts in a simulated engine: how many there are, the time they take, and their acceptance."""

import random
from dataclasses import dataclass
from typing import Any

from kvq.capacity.plan.step_time import StepTime
from kvq.errors import ConfigError, nearest
from kvq.scheduler import Branch, Scheduler, StepPlan
from kvq.scheduler.draft_depth import MOST_DRAFTS, Depth, drafts_allowed

_NAMES = ["k", "acceptance", "draft", "adapts"]
_SPELLING = "k=4,acceptance=0.8,draft=0.1, where acceptance alone is needed, and adapts=false makes always k"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:  # D286: the engine's own rule, with a configured acceptance rate
    """Assumptions about drafts, and the seed that decides which drafts are accepted."""

    k: int = 4  # maximum number of drafts per sequence and step
    acceptance: float  # probability of accepting a draft if all before it were accepted
    draft: float = 0.0  # time of one draft pass, relative to a decode step; 0: prompt lookup
    adapts: bool = True  # False: always k drafts, regardless of their cost
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.k) is not int or not 1 <= self.k <= MOST_DRAFTS:
            raise ConfigError(f"k must be a whole number of 1 to {MOST_DRAFTS}, got {self.k!r}")
        for name in ("acceptance", "draft"):
            if not isinstance(value := getattr(self, name), int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number of 0 to 1, got {value!r}")
        if not isinstance(self.adapts, bool):
            raise ConfigError(f"adapts must be true or false, got {self.adapts!r}")


def parse_drafting(text: str | None, option: str, seed: int = 0) -> Drafting | None:
    """Parse a text such as `k=4,acceptance=0.8,draft=0.1`; None, "" and "off" mean no drafts.

    Raises:
        ConfigError: a name is unknown or missing, or a value is out of range; the message names `option`.
    """
    if text is None or text.strip() in ("", "off"):
        return None
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or name in values:
            what = "is there twice" if name in values else "is no name=value"
            raise ConfigError(f"{option} {text!r} has {part!r}, which {what}; write {_SPELLING}")
        if name not in _NAMES:
            raise ConfigError(f"{option} has no {name!r}{nearest(name, _NAMES) or ';'} write {_SPELLING}")
        values[name] = value
    if "acceptance" not in values:
        raise ConfigError(f"{option} needs acceptance, how probably a draft is right; write {_SPELLING}")
    try:
        return Drafting(**{name: _value(name, value) for name, value in values.items()}, seed=seed)
    except ConfigError as error:
        raise ConfigError(f"{option} {text!r}: {error}; write {_SPELLING}") from None


def _value(name: str, text: str) -> Any:
    """Convert a value to its type; text that can't be converted is returned, for `Drafting` to reject."""
    if name == "adapts":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return int(text) if name == "k" and text.isascii() and text.isdigit() else float(text)
    except ValueError:
        return text


class Guesser:
    """Drafting in one engine, by the rules of `kvq.engine.speculation`, with random acceptance."""

    def __init__(self, drafting: Drafting, scheduler: Scheduler, time: StepTime, rng: random.Random) -> None:
        self._drafting = drafting
        self._scheduler = scheduler
        self._time = time
        self._rng = rng
        self.depth = Depth(scheduler.costs, drafting.draft > 0, adapts=drafting.adapts)

    def plan(self, *, is_steady: bool) -> None:
        """Set the number of drafts of each branch for the next step to be planned.

        `is_steady`: whether the step will equal the last one, so that the previous choice may be reused.
        """
        if is_steady and self.depth.rests:
            self.depth.rest()
            return
        allowed = drafts_allowed(self._scheduler, self._drafting.k)
        most = {branch: count for branch, count in allowed.items() if count}
        for branch, count in self.depth.choose(most, len(allowed)).items():
            branch.num_drafts = count

    def drafting_s(self, plan: StepPlan) -> float:
        """Return the seconds that a plan's drafts take: one pass for each draft of the deepest branch."""
        if not plan.num_drafts or not self.depth.takes_passes:
            return 0.0
        seconds, passes = 0.0, max(plan.drafts)
        for number in range(passes):
            pairs = zip(plan.ends, plan.drafts, strict=True)
            lengths = [end - drafts + number for end, drafts in pairs if drafts > number]
            seconds += self._drafting.draft * self._time.decode_s(lengths)
        self.depth.draft_s.observe(sum([drafts > 0 for drafts in plan.drafts]), seconds / passes)
        return seconds

    def right(self, branch: Branch, drafts: int) -> int:
        """Sample how many of a branch's drafts are accepted, and record the result for later choices."""
        count = 0
        while count < drafts and self._rng.random() < self._drafting.acceptance:
            count += 1
        self.depth.learn(branch, drafts, count)
        return count
