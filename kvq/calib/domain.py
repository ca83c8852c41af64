"""Are static scales fit for another text? Scales of one kind of text may clip another's."""

from collections.abc import Callable
from dataclasses import dataclass

from kvq.calib.observe import observe
from kvq.evals.perplexity import measure_perplexity
from kvq.evals.text import EvalText
from kvq.formats import StaticScales
from kvq.models import Model

_LARGER = 1.05  # a maximum counts as exceeded from here on
_WORSE = 0.003  # of perplexity, from where on the scales are called unfit


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainCheck:
    """Scales from one text, tried on another. Fields are JSON keys of `kvq calibrate --check`."""

    calibrated_on: str
    checked_on: str
    kv: str
    heads: int  # of K and of V, over all layers
    heads_exceeded: int  # whose maximum on the checked text is over 5% above the calibrated one
    largest_excess: float  # the checked text's maximum / the calibrated one, of the worst head
    worst_head: str
    perplexity: float  # with the calibrated scales
    own_perplexity: float  # with scales from the checked text itself
    twin_perplexity: float  # of the format whose scales are found per token
    change: float  # of perplexity, against the twin
    is_fit: bool

    def line(self) -> str:
        """The verdict in a sentence."""
        verdict = "fit" if self.is_fit else "NOT fit"
        return (
            f"scales from {self.calibrated_on} are {verdict} for {self.checked_on}: {self.heads_exceeded} "
            f"of {self.heads} heads go beyond them (most: {self.largest_excess:.2f}x, {self.worst_head}); "
            f"perplexity with {self.kv} {self.perplexity:.3f}, with scales of its own "
            f"{self.own_perplexity:.3f}, with scales per token {self.twin_perplexity:.3f} "
            f"({self.change:+.2%})"
        )


def check_domain(
    model: Model,
    scales: StaticScales,
    calibrated_on: str,
    text: EvalText,
    *,
    kv: str = "fp8_per_head",
    context: int | None = None,
    max_windows: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DomainCheck:
    """Compare scales with those of another text, and what each costs there.

    `kv`: a format with static scales; its twin finds them per token. They are fit if they cost less
    than 0.3% of perplexity more than the twin.

    Raises:
        RequestError: a text that is too short.
        ConfigError: a format without a twin.
    """
    seen = observe(model, text, context=context, max_windows=max_windows, progress=progress)
    excess = [
        (found / allowed, f"{part.upper()} of layer {index}, head {head}")
        for index, (own, given) in enumerate(zip(seen.scales().layers, scales.layers, strict=True))
        for part in ("k", "v")
        for head, (found, allowed) in enumerate(zip(getattr(own, part), getattr(given, part), strict=True))
    ]
    twin = kv.replace("_per_head", "")
    window = min(context or 1024, model.weights.max_context)
    given, other = (
        measure_perplexity(
            model.with_static_scales(some),
            ["auto", *names],
            text.text,
            context=window,
            max_windows=max_windows,
        )
        for some, names in ((scales, [kv, twin]), (seen.scales(), [kv]))
    )
    change = given[1].perplexity / given[2].perplexity - 1
    return DomainCheck(
        calibrated_on=calibrated_on,
        checked_on=text.name,
        kv=kv,
        heads=len(excess),
        heads_exceeded=sum(ratio > _LARGER for ratio, _ in excess),
        largest_excess=max(excess)[0],
        worst_head=max(excess)[1],
        perplexity=given[1].perplexity,
        own_perplexity=other[1].perplexity,
        twin_perplexity=given[2].perplexity,
        change=change,
        is_fit=change < _WORSE,
    )
