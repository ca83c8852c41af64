"""Chat templates of rerankers: a query and a document as the messages of two roles."""

import re

ROLES = ("query", "document")
# Of models that answer yes or no and have no such template. Source: the model card of Qwen3-Reranker.
YES_NO = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    '{% for message in messages %}{% if message.role == "query" %}<Query>: {{ message.content }}\n'
    '{% elif message.role == "document" %}<Document>: {{ message.content }}{% endif %}{% endfor %}'
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{{ '' }}"  # Jinja drops a last newline
)


def knows_pairs(source: str) -> bool:
    """Return True if a template's source names both roles."""
    return all(re.search(rf"""['"]{role}['"]""", source) for role in ROLES)
