"""Model geometry: the numbers that determine the size of the KV cache and which tokens attend to which."""

from dataclasses import dataclass, field, replace
from math import prod

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """Sizes of the key and value into which model code expands a latent vector for every query head."""

    k_dim: int  # elements of the key, without its rotary part
    v_dim: int  # elements of the value


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGeometry:
    """One attention layer that stores K and V. `window`: tokens that a query sees, including its own."""

    index: int  # among the layers that store K and V
    kv_heads: int
    k_head_dim: int  # elements
    v_head_dim: int  # elements
    window: int | None = None  # None: all earlier tokens
    is_chunked: bool = False  # windows don't overlap: each begins at a multiple of `window`
    number: int = -1  # of the layer in the model's code, by default `index`
    readers: tuple[int, ...] = ()  # numbers of the layers that attend over its K and V, but store none
    q_heads: int | None = None  # None: as for the model
    has_sinks: bool | None = None  # None: as for the model
    is_latent: bool = False  # K: the rotary part, V: the latent vector; every query head reads both
    expansion: Expansion | None = None  # of a latent layer, if known

    def __post_init__(self) -> None:
        if self.number < 0:
            object.__setattr__(self, "number", self.index)
        for name in ("kv_heads", "k_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layer {self.index}: {name} must be positive, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"layer {self.index}: window must be positive, got {self.window}")
        if self.is_chunked and self.window is None:
            raise ConfigError(f"layer {self.index}: chunks need a length, its window")

    @property
    def kind(self) -> str:
        """The layer's kind: `full`, `sliding` or `latent`."""
        if self.is_latent:
            return "latent"
        return "full" if self.window is None else "sliding"

    @property
    def elements_per_token(self) -> int:
        """Number of K and V elements that one token adds to this layer."""
        return self.kv_heads * (self.k_head_dim + self.v_head_dim)

    def expanded(self, q_heads: int) -> "LayerGeometry":
        """Return the layer with each head's K and V in place of latent vectors, as model code attends."""
        if self.expansion is None:
            return self
        own = self.expansion
        return replace(
            self,
            kv_heads=q_heads,
            k_head_dim=own.k_dim + self.k_head_dim,
            v_head_dim=own.v_dim,
            is_latent=False,
            expansion=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor of a sequence's recurrent state."""

    name: str  # `conv`, `recurrent` or `linear`
    index: int  # among the layer's tensors of that name
    shape: tuple[int, ...]
    dtype: str | None  # torch's name; None: the dtype that the model computes in

    def nbytes(self, compute_bytes: int) -> int:
        """Return the tensor's size in bytes; `compute_bytes`: bytes per element in the compute dtype."""
        return prod(self.shape) * (_STATE_BYTES[self.dtype] if self.dtype else compute_bytes)


_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateGeometry:
    """A layer with a state of fixed size: that of a recurrence, or the last inputs of a convolution."""

    number: int  # of the layer in the model's code
    kind: str  # the class of the module that computes it
    tensors: tuple[StateTensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers of the same kind and window, which share one pool and have one table per sequence."""

    index: int
    window: int | None
    layers: tuple[LayerGeometry, ...]

    @property
    def name(self) -> str:
        """The group's name: `full` or `sliding-WINDOW`."""
        return "full" if self.window is None else f"sliding-{self.window}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGeometry:
    """Attention structure of one model, as described by its config."""

    model_type: str
    layers: tuple[LayerGeometry, ...]
    q_heads: int
    hidden_size: int
    vocab_size: int
    max_context: int  # tokens
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    has_sinks: bool = False  # in any layer: a learned logit per query head joins the softmax, without a value
    states: tuple[StateGeometry, ...] = ()  # of the layers that keep one, in order
    _places: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a model needs at least one attention layer, got none")
        own = {layer.number: layer.index for layer in self.layers}
        read = {number: layer.index for layer in self.layers for number in layer.readers}
        object.__setattr__(self, "_places", own | read)
        for layer in self.layers:
            if (q_heads := self.q_heads_of(layer.index)) % layer.kv_heads:
                raise ConfigError(
                    f"layer {layer.index}: {q_heads} query heads don't divide evenly "
                    f"among {layer.kv_heads} KV heads"
                )

    def place(self, number: int) -> int | None:
        """Return the index in `layers` of the K and V to which a model layer attends, or None."""
        return self._places.get(number)

    def q_heads_of(self, place: int) -> int:
        """Return the number of query heads of the layer at index `place` in `layers`."""
        own = self.layers[place].q_heads
        return self.q_heads if own is None else own

    def has_sinks_of(self, place: int) -> bool:
        """Return True if the layer at index `place` in `layers` has sinks."""
        own = self.layers[place].has_sinks
        return self.has_sinks if own is None else own

    @property
    def last_layer(self) -> int:
        """Highest number of a layer that attends or has a state."""
        return max([*self._places, *(state.number for state in self.states)])

    def stores(self, number: int) -> bool:
        """Return True if layer `number` of the model's code stores its own K and V."""
        place = self._places.get(number)
        return place is not None and self.layers[place].number == number

    def state_bytes(self, compute_bytes: int) -> int:
        """Return the size of a sequence's states in bytes; `compute_bytes`: as for StateTensor.nbytes."""
        return sum(x.nbytes(compute_bytes) for state in self.states for x in state.tensors)

    def computed_in(self, dtype: str) -> "ModelGeometry":
        """Return the geometry with compute dtype `dtype` (torch's name) for all states without a dtype."""

        def held(state: StateGeometry) -> StateGeometry:
            tensors = tuple(replace(tensor, dtype=tensor.dtype or dtype) for tensor in state.tensors)
            return replace(state, tensors=tensors)

        return replace(self, states=tuple(map(held, self.states)))

    def expanded(self) -> "ModelGeometry":
        """Return the geometry with each head's K and V in place of latent vectors."""
        return replace(self, layers=tuple(layer.expanded(self.q_heads) for layer in self.layers))

    @property
    def head_dims(self) -> list[tuple[int, int]]:
        """The pair (k_head_dim, v_head_dim) of every layer."""
        return [(layer.k_head_dim, layer.v_head_dim) for layer in self.layers]

    @property
    def kv_heads(self) -> list[int]:
        """Number of KV heads in each layer."""
        return [layer.kv_heads for layer in self.layers]

    @property
    def elements_per_token(self) -> int:
        """Number of K and V elements that one token adds, summed over all layers."""
        return sum(layer.elements_per_token for layer in self.layers)

    def groups(self) -> tuple[LayerGroup, ...]:
        """Return the layer groups: full attention first, then windows in decreasing order."""
        windows = {layer.window for layer in self.layers}
        ordered = sorted(windows, key=lambda w: (w is not None, -(w or 0)))
        return tuple(
            LayerGroup(index=i, window=window, layers=tuple(x for x in self.layers if x.window == window))
            for i, window in enumerate(ordered)
        )
