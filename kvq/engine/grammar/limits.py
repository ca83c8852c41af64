"""What one grammar may cost: to read, to compile, to keep and to step."""

from dataclasses import dataclass, fields

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarLimits:
    """Bounds on what a request's grammar may take.

    `max_bytes`: the schema, regex, Lark text or choices, as UTF-8. `max_depth`: brackets within
    brackets, in a JSON schema as in a regex. `compile_timeout_s` and `compile_memory_bytes`: one
    compile, in processor time, and in memory on top of what the tokenizer holds. `max_cached`:
    grammars remembered as sound. `max_waiting`: grammars being compiled or waiting for it. The rest
    bound the work and the memory of a mask: `max_lexer_states` of about 2 kB each over a request's
    whole life,
    `step_lexer_fuel` of about 14,000 a millisecond, `step_items` of about 20,000 a millisecond,
    and `row_items`, the alternatives that may be open after one token.
    """

    max_bytes: int = 512 << 10
    max_depth: int = 64
    compile_timeout_s: float = 10
    compile_memory_bytes: int = 128 << 20
    max_cached: int = 256
    max_waiting: int = 64
    max_lexer_states: int = 50_000
    step_lexer_fuel: int = 200_000
    step_items: int = 20_000
    row_items: int = 2_000

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(
                    f"GrammarLimits.{field.name} must be above 0, got {getattr(self, field.name)}"
                )

    @property
    def parser(self) -> dict[str, int]:
        """The bounds that llguidance keeps, under its own names."""
        return {
            "max_lexer_states": self.max_lexer_states,
            "step_lexer_fuel": self.step_lexer_fuel,
            "step_max_items": self.step_items,
            "max_items_in_row": self.row_items,
        }
