r"""Splits of texts before byte-level merges, by the names that GGUF files give them (tokenizer.ggml.pre).

A text is cut at the matches of each pattern in turn; the parts between matches stay. The patterns are those
of the models' own tokenizers.
"""

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [r"[^\r\n\p{L}\p{N}]?" + word for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")]
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_BLANKS}"
_SEED = rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
_GPT4O = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_BLANKS}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}[\r\n/]*|{_BLANKS}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
_DEEPSEEK = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_LLAMA = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
_FAMILIES = {
    "default": _DEFAULT,
    "gpt-2 phi-2 mpt olmo jais exaone4 a.x-4.0 mellum modern-bert": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT2),
    f"{_LLAMA} dbrx smaug-bpe glm4 chatglm-bpe": (_LLAMA3,),
    "qwen2 deepseek-r1-qwen stablelm2 megrez kormo hunyuan solar-open grok-2": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (_GPT4O,),
    "deepseek-v3 hunyuan-dense joyai-llm": _DEEPSEEK3,
    "deepseek-coder": _DEEPSEEK,
    "seed-coder": (_SEED,),
}
SPLITS = {name: patterns for names, patterns in _FAMILIES.items() for name in names.split()}
# These take a part that is a token as it is, without merges, and begin texts with bos unless forbidden.
WHOLE = frozenset(["tekken", *_LLAMA.split()])
