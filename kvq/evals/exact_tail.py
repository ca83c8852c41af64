"""Share of keys that a staged recipe leaves unquantized; if the share is large, the divergence means little.

If a recipe keeps all tokens of a window in bf16 because they are young, its divergence is 0 in any format.
"""

from collections.abc import Iterable, Sequence

from kvq.errors import ConfigError
from kvq.evals.report.sections import MOST, exactness_warning
from kvq.formats import KVRecipe
from kvq.kernels.attend.options import Part
from kvq.layout import KVLayout
from kvq.models.loading.prepared import PreparedModel


def exact_keys(layout: KVLayout, queries: range, attention_window: int | None = None) -> float:  # D25
    """Return the unquantized share of the keys that queries at these positions see, averaged over layers.

    A query sees its own position and earlier positions, at most `attention_window` in total. Without a
    staging area, the share is 0.
    """
    if not layout.recipe.is_staged:
        return 0.0
    young = Part(is_young=True, recent=layout.exact.recent, block_size=layout.block_size)
    sinks, shares = layout.exact.sinks, 0.0
    for group in layout.sealed:
        window = min(filter(None, (group.layers[0].geometry.window, attention_window)), default=queries.stop)
        firsts = [(p, max(0, p + 1 - window)) for p in queries]
        seen = sum(p + 1 - first for p, first in firsts)
        sealed = sum(max(0, young.edge(p) - max(first, sinks)) for p, first in firsts)
        shares += len(group.layers) * (1 - sealed / seen)
    return shares / len(layout.geometry.layers)


def check_exact(  # D45: windows kept entirely exact are refused
    model: PreparedModel,
    recipes: Iterable[KVRecipe],
    sequences: Sequence[range],
    *,
    advice: str,
    attention_window: int | None = None,
) -> list[str]:
    """Return warnings about quantized recipes that leave most keys exact in any of these sequences.

    `sequences`: the positions of the scored queries. The last query of a window is not scored, because the
    token it predicts is unknown. `advice`: alternatives suggested in the message.

    Raises:
        ConfigError: with some recipe, no scored query sees a quantized key.
    """
    warnings = []
    for recipe in recipes:
        if not (recipe.is_quantized and recipe.is_staged):
            continue
        layout = model.layout(recipe)
        shares = {queries: exact_keys(layout, queries, attention_window) for queries in sequences}
        if min(shares.values()) == 1:
            is_open = not (recipe.exact.recent or recipe.exact.sinks)
            blocks = f", in blocks of {layout.block_size} tokens," if is_open else ""
            raise ConfigError(
                f"{recipe.name}{blocks} keeps all of {max(x.stop for x in sequences) + 1:,} tokens "
                f"unquantized that are seen, so any format would look lossless; {advice}"
                f"{', or give a smaller --block-size' if is_open else ''}"
            )
        queries, most = max(shares.items(), key=lambda item: item[1])
        if most > MOST:
            warnings.append(f"{exactness_warning(recipe.name, most, queries.stop + 1)}; {advice}")
    return warnings
