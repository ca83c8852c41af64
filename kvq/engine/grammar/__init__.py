"""Structured output: masks that restrict generated text to a JSON schema, regex, choice or grammar.

`GrammarCompiler` turns a `StructuredOutput` into a `Matcher`, outside the step loop. Each branch of a
request then has a copy, which returns the tokens allowed next and is advanced by the chosen token.
"""
