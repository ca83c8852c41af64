"""Triton's interpreter, made quicker: it does over and over what it needs to do once.

It looks through Triton's whole language for what to patch whenever a kernel calls a function, makes a
table of NumPy's types for every value, describes every value's shape anew, compares shapes number by
number, and looks for overflows with tensors of its own.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def make_quicker() -> None:  # D155: patched: types and overflows checked once
    """Patch the language once a launch, keep what never changes, compare and check at once."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter._patch_lang = _Patches(interpreter).patch
    interpreter._get_np_dtype = _numpy_types(interpreter)
    core.block_type.__init__ = _block_types(core)
    core.tensor.__init__ = _tensors(core)
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    TritonSemantic.broadcast_impl_value = _broadcasting(TritonSemantic.broadcast_impl_value)


class _Patches:
    """What the running launch has patched, or functions that it called."""

    def __init__(self, interpreter: ModuleType) -> None:
        self._patch_lang: Callable[[Any], Any] = interpreter._patch_lang
        self._languages = interpreter.tl, interpreter.tl.core
        self._known: dict[Any, frozenset[str]] = {}  # the languages that a function sees
        self._patched: frozenset[str] = frozenset()

    def patch(self, function: Any) -> Any:
        """As the interpreter's own, except for languages that are patched already."""
        if function not in self._known:
            seen = [x for x in function.__globals__.values() if any(x is one for one in self._languages)]
            self._known[function] = frozenset(x.__name__ for x in seen)
        languages = self._known[function]
        if languages and languages <= self._patched:
            return None
        scope = self._patch_lang(function)
        self._patched |= languages
        restore = scope.restore

        def end() -> None:
            self._patched = frozenset()
            restore()

        scope.restore = end  # nobody ends the scope of a called function
        return scope


def _numpy_types(interpreter: ModuleType) -> Callable[[Any], Any]:
    look_up = interpreter._get_np_dtype
    of_numbers = lru_cache(look_up)

    def type_of(kind: Any) -> Any:
        scalar = kind.scalar
        return look_up(scalar) if scalar.is_ptr() else of_numbers(scalar)

    return type_of


def _block_types(core: ModuleType) -> Callable[..., None]:
    """Types of one element and shape are checked and described once, with what tensors say of their shape."""
    describe = core.block_type.__init__
    known: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}  # their elements live, so ids are theirs

    def start(self: Any, element: Any, shape: Any) -> None:
        key = id(element), tuple(getattr(x, "value", x) for x in shape)
        if key in known:
            self.__dict__.update(known[key])
            return
        describe(self, element, shape)
        self.of_tensors = core.constexpr(self.numel), core.tuple([core.constexpr(x) for x in self.shape])
        if not element.is_ptr():  # of which every argument has one of its own
            known[key] = dict(self.__dict__)

    return start


def _tensors(core: ModuleType) -> Callable[..., None]:
    of_scalars = core.constexpr(1), core.tuple([])

    def start(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = kind.of_tensors if kind.is_block() else of_scalars

    return start


def _broadcasting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def of_two(semantic: Any, one: Any, other: Any) -> Any:
        kinds = one.type, other.type
        if all(x.is_block() for x in kinds) and list(kinds[0].shape) == list(kinds[1].shape):
            return one, other
        return broadcast(semantic, one, other)

    return of_two


def _check_overflow(semantic: Any, one: Any, other: Any, operation: Any) -> None:
    """An assertion that the result of an operation on integers fits their type."""
    kind = one.type.scalar
    if kind.int_bitwidth >= 64 or not semantic.builder.options.sanitize_overflow:
        return
    a, b = (np.asarray(x.handle.data).astype(np.int64) for x in (one, other))
    exact = _OPERATIONS[operation.__name__](a, b)
    fits = exact.min() >= kind.get_int_min_value() and exact.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
