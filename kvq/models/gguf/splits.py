r"""Splits of texts before byte-level merges, by the names that GGUF files give them (tokenizer.ggml.pre).

A text is cut at the matches of each pattern in turn; the parts between matches stay. The patterns are those of
the models' own tokenizers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a family cuts texts, and what its files needn't say."""

    patterns: tuple[str, ...]  # regular expressions, one applied after another
    has_whole_words: bool = False  # a part that is a token is taken as it is, without merges
    adds_bos: bool = False  # unless the file says otherwise


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_PATHS}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}"
_SEED = rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_FAMILIES = {
    "default": Split(patterns=_DEFAULT),
    "gpt-2 phi-2 mpt olmo jais exaone4 a.x-4.0 mellum modern-bert": Split(patterns=(_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Split(
        patterns=(r"\p{N}", _GPT2)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2": Split(
        patterns=(_LLAMA3,), has_whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split(patterns=(_LLAMA3,)),
    "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2": Split(patterns=(_QWEN2,)),
    "qwen35": Split(patterns=(_QWEN35,)),
    "tekken": Split(patterns=(_TEKKEN,), has_whole_words=True, adds_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Split(patterns=(_GPT4O,)),
    "deepseek-v3 hunyuan-dense joyai-llm": Split(patterns=_DEEPSEEK3),
    "deepseek-coder": Split(patterns=_DEEPSEEK_CODER),
    "seed-coder": Split(patterns=(_SEED,)),
    "falcon": Split(patterns=_FALCON),
}
SPLITS = {name: split for names, split in _FAMILIES.items() for name in names.split()}
