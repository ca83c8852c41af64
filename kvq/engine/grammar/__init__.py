"""Structured output: masks that restrict generated text to a JSON schema, regex, choice or grammar.

`GrammarCompiler` turns a `StructuredOutput` into a `Matcher`, outside the step loop. Each branch of a request
gets its own copy, which returns the tokens allowed next and advances with each chosen token.
"""
