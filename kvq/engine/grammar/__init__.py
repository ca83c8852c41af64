"""Structured output: masks that keep generated text inside a JSON schema, regex, choice or grammar.

`GrammarCompiler` turns a `StructuredOutput` into a `Grammar`, off the step loop; each branch of a
request then asks its own `Matcher` which tokens may come next, and tells it which one came.
"""

from kvq.engine.grammar.compiler import GrammarCompiler
from kvq.engine.grammar.limits import GrammarLimits
from kvq.engine.grammar.matcher import Grammar, Matcher

__all__ = ["Grammar", "GrammarCompiler", "GrammarLimits", "Matcher"]
