"""Chat templates and tokenizers of seven families, built small."""

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = [
    "Once upon a time there was a king who had three daughters, and they lived by the sea.",
    "system user assistant tool im_start im_end hi obey <b>bold</b> [x] 1 + 2 = 3 | <| |> < > obey\n\n  x",
] * 3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_response>\n{% endif %}"
    "{{ m.content }}{% if m.role == 'tool' %}\n</tool_response>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if documents %}{% for d in documents %}<|im_start|>{{ d.text }}<|im_end|>{% endfor %}{% endif %}"
    "<|im_start|>assistant\n<think>\n"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% for d in documents or [] %}<|start_header_id|>{{ d | tojson }}<|eot_id|>{% endfor %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% for d in documents or [] %}{{ d.title }}{{ d.text }}{% endfor %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}"
    "{% for d in documents or [] %}{{ d.text }}<end_of_turn>{% endfor %}<start_of_turn>model\n"
)
DEEPSEEK = (
    "<\uff5cbegin▁of▁sentence\uff5c>{% for m in messages %}"
    "{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% elif m.role == 'tool' %}<\uff5ctool▁output▁begin\uff5c>{{ m.content }}<\uff5ctool▁output▁end\uff5c>"
    "{% else %}<\uff5cAssistant\uff5c>{{ m.content }}<\uff5cend▁of▁sentence\uff5c>{% endif %}{% endfor %}"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}<\uff5cAssistant\uff5c>"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% for d in documents or [] %}{{ d.text }}<|end|>{% endfor %}<|assistant|>\n"
)


def byte_level(split=None):
    made = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return made


def sentencepiece(control, *, prepend=True):
    """As converted from SentencePiece: control tokens are pieces of the vocabulary."""
    steps = [normalizers.Prepend("▁")] if prepend else []
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    pieces = [*control, *bytes_]
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=500, special_tokens=pieces))
    tree = json.loads(made.to_str())  # bytes are no added tokens
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in bytes_]
    made = Tokenizer.from_str(json.dumps(tree))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def unigram(control):
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=120, special_tokens=list(control), unk_token=control[0])
    )
    return made


def finish(backend, control, template, *, plain=(), rstrip=False):
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False, rstrip=rstrip) for one in control]
    )
    backend.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def qwen():
    markers = ("<think>", "</think>", "<tool_response>", "</tool_response>")
    return finish(byte_level(), ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), CHATML, plain=markers)


def llama3():
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    backend = byte_level(r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    made = finish(backend, special, LLAMA3)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", made.convert_tokens_to_ids(special[0]))],
    )
    return made


def mistral():
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    return finish(sentencepiece(special), special, MISTRAL)


def gemma():
    special = ("<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    return finish(sentencepiece(special, prepend=False), special, GEMMA, plain=("\n\n", "<b>"))


def deepseek():
    marks = (
        "begin▁of▁sentence",
        "end▁of▁sentence",
        "tool▁output▁begin",
        "tool▁output▁end",
        "User",
        "Assistant",
    )
    return finish(byte_level(), [f"<\uff5c{mark}\uff5c>" for mark in marks], DEEPSEEK)


def phi3():
    special = ("<unk>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    return finish(sentencepiece(special), special, PHI3, rstrip=True)


def t5():
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    return finish(unigram(special), special, MISTRAL)


FAMILIES = {make.__name__: make for make in (qwen, llama3, mistral, gemma, deepseek, phi3, t5)}
