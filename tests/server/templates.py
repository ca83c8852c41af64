"""Folders with the embedded model's tokenizer and a chat template of the test's."""

import shutil
from pathlib import Path

from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.server.admission.prompts import Prompts
from kvq.server.reading import Readers, Setup

# Ends for nobody who lives, for a first message with this word in it
LOOP = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}" + "{% endfor %}" * 3
LOOPS_ON_LOOP = "{% if 'loop' in messages[0].content %}" + LOOP + "{% endif %}{{ messages[0].content }}"


def folder_with(folder: Path, template: str | None) -> Path:
    """The tokenizer's files; None: without a template."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED["tiny"] / name, folder / name)
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def prompts_of(folder: Path, *, trusts_chats: bool = False, **options) -> Prompts:
    """Over readers of their own; to be closed."""
    setup = Setup(folder=str(folder), trusts_chats=trusts_chats)
    return Prompts(Readers(setup), load_tokenizer(folder), **options)
