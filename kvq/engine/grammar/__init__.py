"""Structured output: masks that keep generated text inside a JSON schema, regex, choice or grammar.

`GrammarCompiler` turns a `StructuredOutput` into a `Matcher`, off the step loop; each branch of a
request then asks its own copy which tokens may come next, and tells it which one came.
"""
