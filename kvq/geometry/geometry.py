"""Geometry: the numbers of a model that decide how large its KV cache is and who attends to whom."""

from dataclasses import dataclass

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGeometry:
    """One attention layer. `window` counts the tokens a query sees, its own included."""

    index: int
    kv_heads: int
    k_head_dim: int  # elements
    v_head_dim: int  # elements
    window: int | None = None  # None: all earlier tokens

    def __post_init__(self) -> None:
        for name in ("kv_heads", "k_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layer {self.index}: {name} must be positive, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"layer {self.index}: window must be positive, got {self.window}")

    @property
    def kind(self) -> str:
        """`full` or `sliding`."""
        return "full" if self.window is None else "sliding"

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token adds to this layer."""
        return self.kv_heads * (self.k_head_dim + self.v_head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """The layers of equal kind and window; they share one pool and one table per sequence."""

    index: int
    window: int | None
    layers: tuple[LayerGeometry, ...]

    @property
    def name(self) -> str:
        """`full`, or `sliding-WINDOW`."""
        return "full" if self.window is None else f"sliding-{self.window}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGeometry:
    """The attention of one model, as its config describes it."""

    model_type: str
    layers: tuple[LayerGeometry, ...]
    q_heads: int
    hidden_size: int
    vocab_size: int
    max_context: int  # tokens
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    has_sinks: bool = False  # a learned logit per query head joins the softmax and gives no value

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a model needs at least one attention layer, got none")
        for layer in self.layers:
            if self.q_heads % layer.kv_heads:
                raise ConfigError(
                    f"layer {layer.index}: {self.q_heads} query heads don't divide evenly "
                    f"among {layer.kv_heads} KV heads"
                )

    @property
    def head_dims(self) -> list[tuple[int, int]]:
        """(k_head_dim, v_head_dim) of every layer."""
        return [(layer.k_head_dim, layer.v_head_dim) for layer in self.layers]

    @property
    def kv_heads(self) -> list[int]:
        """KV heads of every layer."""
        return [layer.kv_heads for layer in self.layers]

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token adds over all layers."""
        return sum(layer.elements_per_token for layer in self.layers)

    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups, full attention first, then by falling window."""
        windows = {layer.window for layer in self.layers}
        ordered = sorted(windows, key=lambda w: (w is not None, -(w or 0)))
        return tuple(
            LayerGroup(index=i, window=window, layers=tuple(x for x in self.layers if x.window == window))
            for i, window in enumerate(ordered)
        )
