"""Tokenizers of GGUF files: ids, special tokens, templates, and refusals of metadata that don't fit."""

import copy
import logging
import time

import pytest
from transformers import PreTrainedTokenizerFast

from kvq.engine.grammar.vocabulary import read_vocabulary
from kvq.engine.params import SamplingParams
from kvq.engine.requests.text import TextStream
from kvq.errors import ModelError
from kvq.models.gguf.splits import SPLITS
from kvq.models.gguf.tokenizer import load_gguf_tokenizer
from kvq.models.loading.control_tokens import ControlTokens
from kvq.models.loading.tokenizer import check_knows_text, check_vocabulary
from kvq.models.run.prompts import PromptEncoder

NAME = "small.gguf"
SPACE = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}</turn>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def scored(*pieces, control=("<turn>", "</turn>"), user_defined=(), **more):
    """A SentencePiece vocabulary: letters, and pieces with the scores 0, -1, -2 and so on."""
    letters = [SPACE, *(chr(code) for code in range(0x21, 0x7F))]
    tokens = {"<unk>": (2, -9.0), "<s>": (3, -9.0), "</s>": (3, -9.0)} | dict.fromkeys(BYTES, (6, 0.0))
    tokens |= dict.fromkeys(control, (CONTROL, -1000.0)) | dict.fromkeys(
        user_defined, (USER_DEFINED, -1000.0)
    )
    tokens |= {piece: (1, -float(at)) for at, piece in enumerate([*pieces, *letters]) if piece not in tokens}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens],
        "tokenizer.ggml.token_type": [kind for kind, _ in tokens.values()],
        "tokenizer.ggml.scores": [score for _, score in tokens.values()],
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def byte_level(*merges, more_tokens=None, **more):
    """A byte-level vocabulary: 256 bytes, what the merges make (or "th" alone), and tokens of other kinds."""
    merges = merges or ("t h",)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = dict.fromkeys([*map(chr, printable), *(chr(256 + i) for i in range(256 - len(printable)))], 1)
    tokens |= dict.fromkeys((merge.replace(" ", "") for merge in merges), 1)
    tokens |= {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL} | (more_tokens or {})
    given = {
        "model": "gpt2", "pre": "qwen2", "tokens": [*tokens], "token_type": [*tokens.values()],
        "merges": [*merges], "eos_token_id": [*tokens].index("<|im_end|>"),
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (given | more).items() if value is not None}


def pieces(metadata, text, **options):
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False, **options)["input_ids"])


def test_the_highest_score_is_merged_first():
    assert pieces(scored("bc", "ab", "a"), "abc") == [SPACE, "a", "bc"]
    assert pieces(scored("ab", "bc", "a"), "abc") == [SPACE, "ab", "c"]


def test_what_is_no_token_is_written_in_bytes_and_comes_back_once_it_is_whole():
    tokenizer = load_gguf_tokenizer(scored("he", "hel"), NAME)
    text = "hel€ 🦙\n~ é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == [SPACE, "hel", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(ids) == text
    stream = TextStream(tokenizer, [1], SamplingParams(max_tokens=99))
    shown = [stream.push(token) for token in ids]
    assert shown[2:5] == ["", "", "€"]
    assert "".join(shown) + stream.finish() == text


def test_bytes_that_are_no_text_are_shown_as_such():
    tokenizer = load_gguf_tokenizer(scored(), NAME)
    broken = [tokenizer.convert_tokens_to_ids(byte) for byte in ("<0xE2>", "<0x82>", "a")]
    stream = TextStream(tokenizer, [], SamplingParams(max_tokens=9))
    assert "".join(stream.push(token) for token in broken) + stream.finish() == "��a"


@pytest.mark.parametrize(
    ("says", "expected"),
    [(None, [SPACE, "a", "<s>", SPACE, SPACE, "b"]), (True, None), (False, ["a", "<s>", SPACE, "b"])],
)
def test_a_space_is_put_before_each_text_unless_the_file_forbids_it(says, expected):
    metadata = scored(add_space_prefix=says)
    assert pieces(metadata, "a<s> b") == (expected or [SPACE, "a", "<s>", SPACE, SPACE, "b"])
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    assert tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "a b"


def test_merges_make_no_control_token_and_plain_text_has_none():
    steps = ["<turn>"[:end] for end in range(2, 6)]
    metadata = scored(*steps, "<0", "<0x", "<0x4", "<0x41", add_space_prefix=False)
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    control = ControlTokens(tokenizer)
    assert pieces(metadata, "<turn>a") == ["<turn>", "a"]
    plain = control.encode_plain("<turn>a<0x41>", special=False)
    assert tokenizer.convert_ids_to_tokens(plain) == ["<turn", ">", "a", "<0x41", ">"]


def test_users_tokens_are_found_before_all_merges_and_the_longest_first():
    metadata = scored("b\n", user_defined=["\n", "\n\n", "  "], add_space_prefix=False)
    assert pieces(metadata, "b\n\n\n   b") == ["b", "\n\n", "\n", "  ", SPACE, "b"]
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    ids = tokenizer("b\n\n  b", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "b\n\n  b"


@pytest.mark.parametrize(
    ("metadata", "begins", "ends"),
    [
        (scored(), True, False),
        (scored(add_bos_token=False, add_eos_token=True), False, True),
        (byte_level(), False, False),
        (byte_level(pre="llama-bpe", bos_token_id=257), True, False),
        (byte_level(pre="llama-bpe", add_bos_token=False), False, False),
        (byte_level(bos_token_id=257, add_bos_token=True, add_eos_token=True), True, True),
    ],
)
def test_texts_begin_and_end_as_the_file_says_or_the_kind_is_used(metadata, begins, ends):
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    ids = tokenizer("a")["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id) == (begins, ends)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4", "a", "'", "T", "Ġ", "Ġb"]),
        ("llama-bpe", ["123", "4", "a", "'T", "Ġ", "Ġb"]),
        ("qwen2", ["1", "2", "3", "4", "a", "'T", "Ġ", "Ġb"]),
        ("gpt-2", ["1234", "a", "'", "T", "Ġ", "Ġb"]),
        ("default", ["123", "4", "a", "'", "T", "Ġ", "Ġb"]),
        ("gpt-4o", ["123", "4", "a'T", "Ġ", "Ġb"]),
        ("tekken", ["1", "2", "3", "4", "a", "'T", "Ġ", "Ġb"]),
        ("deepseek-v3", ["123", "4", "a", "'T", "Ġ", "Ġb"]),
    ],
)
def test_texts_are_split_as_the_named_family_does(pre, expected):
    merges = ("1 2", "12 3", "123 4", "' T", "a 'T", "4 a", "Ġ Ġ", "Ġ b", "ĠĠ b")
    assert pieces(byte_level(*merges, pre=pre, add_bos_token=False), "1234a'T  b") == expected


@pytest.mark.parametrize("pre", SPLITS)
def test_every_family_gives_all_of_a_text_back(pre):
    tokenizer = load_gguf_tokenizer(byte_level("a b", pre=pre, add_bos_token=False), NAME)
    text = "ab  X9 ÄЖ१२ \r\n\n\t_()'s' 漢字かなカナ กำ 🏳️‍🌈 \u2028\u00a0 <|im_end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_whole_words_need_no_merges_in_llamas_families_alone():
    more = {"Ġabc": 1}
    assert pieces(byte_level(pre="llama-bpe", more_tokens=more, add_bos_token=False), " abc") == ["Ġabc"]
    assert pieces(byte_level(pre="qwen2", more_tokens=more), " abc") == ["Ġ", "a", "b", "c"]


def test_padding_of_the_vocabulary_is_no_text():
    metadata = byte_level(more_tokens={"[PAD259]": UNUSED, "[PAD260]": UNUSED})
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    assert len(tokenizer) == 259
    assert tokenizer.decode([259, 260]) == ""


def test_tokens_that_end_turns_are_control_tokens_whatever_their_kind():
    metadata = byte_level(
        more_tokens={"<|im_end|>": 1, "<|endoftext|>": USER_DEFINED, "<tool>": USER_DEFINED}
    )
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    ids = tokenizer("a<|im_end|><|endoftext|><tool>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<|im_end|>", "<|endoftext|>", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"


def test_special_tokens_that_are_stand_ins_stay_ordinary():
    metadata = byte_level(unknown_token_id=0, padding_token_id=0)  # "!"
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    assert tokenizer.unk_token is tokenizer.pad_token is None
    assert tokenizer.decode(tokenizer("a!")["input_ids"], skip_special_tokens=True) == "a!"
    assert load_gguf_tokenizer(byte_level(padding_token_id=0xFFFFFFFF), NAME).pad_token is None


def test_phi_3_takes_no_space_after_its_control_tokens():
    metadata = scored(add_space_prefix=False) | {"general.name": "Phi-3 mini"}
    assert pieces(metadata, "<turn> \n a<s> a") == ["<turn>", "a", "<s>", SPACE, "a"]


def test_tokens_without_a_text_take_their_place_only():
    metadata = byte_level(more_tokens={"": 1, "\udce2\udc82": 1, "x\udc80": USER_DEFINED, "<z>": CONTROL})
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    assert tokenizer.convert_tokens_to_ids("<z>") == 262 == len(tokenizer) - 1
    assert tokenizer("<z>")["input_ids"] == [262]


def test_a_conversation_is_encoded_by_the_files_template():
    metadata = scored("us", "er", add_space_prefix=False, bos_token_id=1) | {
        "tokenizer.chat_template": TEMPLATE
    }
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    assert tokenizer.chat_template == TEMPLATE
    ids = PromptEncoder(tokenizer).encode_chat(
        [{"role": "user", "content": "a</turn>"}], {"add_generation_prompt": True}
    )
    control = [
        tokenizer.convert_ids_to_tokens(i)
        for i in ids
        if i in tokenizer.all_special_ids or i in tokenizer.added_tokens_decoder
    ]
    assert control == ["<s>", "<turn>", "</turn>", "<turn>"]  # the user's own is plain text
    assert tokenizer.decode(ids) == "<s><turn>user\na</turn></turn><turn>assistant\n"


def test_named_templates_are_kept_by_name():
    metadata = scored() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
    }
    assert load_gguf_tokenizer(metadata, NAME).chat_template == {"default": "plain", "tool_use": "with tools"}
    assert load_gguf_tokenizer(scored(), NAME).chat_template is None


@pytest.mark.parametrize(
    "metadata", [scored("he", "hello"), byte_level("h e", "he l")], ids=["scores", "merges"]
)
def test_the_rest_of_kvq_takes_the_tokenizer(metadata, tmp_path):
    tokenizer = load_gguf_tokenizer(metadata, NAME)
    check_vocabulary(tokenizer, tmp_path, len(metadata["tokenizer.ggml.tokens"]))
    check_knows_text(tokenizer, tmp_path)
    words = read_vocabulary(tokenizer, 512, [tokenizer.eos_token_id])
    ids = tokenizer("hello <é", add_special_tokens=False)["input_ids"]
    assert words.tokenizer.decode_str(ids).strip() == "hello <é"
    assert isinstance(tokenizer, PreTrainedTokenizerFast)


def test_the_same_metadata_give_the_same_tokenizer_and_stay_as_they_are():
    metadata = scored("ab", "abc", user_defined=["  "])
    before = copy.deepcopy(metadata)
    first, second = (load_gguf_tokenizer(metadata, NAME).backend_tokenizer for _ in range(2))
    assert first.to_str() == second.to_str()
    assert metadata == before
    assert copy.deepcopy(first) is not first  # a copy is one


def without(metadata, key):
    return {name: value for name, value in metadata.items() if name != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "model is None"),
        (scored(model="bert"), "model is 'bert'; kvq reads llama"),
        (scored(model=7), "model must be of type str, got 7"),
        (without(scored(), "tokens"), "tokens is missing"),
        (scored(tokens=[]), "tokens is empty"),
        (scored(tokens=["a", 1]), "tokens must be a list of str, got int"),
        (scored(tokens=["a", "b", "a"]), "tokens has 'a' at 0 and at 2"),
        (without(scored(), "token_type"), "token_type is missing"),
        (scored(token_type=[1, 2]), "token_type has 2 values for 356 tokens"),
        (byte_level(token_type=[1] * 258 + [9]), "token_type must be 0 to 6, got 9"),
        (without(scored(), "scores"), "scores is missing"),
        (scored(scores=[0.0]), "scores has 1 values for 356 tokens"),
        (scored(scores=[float("nan")] * 356), "scores must be numbers, got NaN"),
        (byte_level(merges=None), "merges is missing"),
        (byte_level("a b", merges=["ab"]), "merges doesn't fit the tokens"),
        (byte_level(merges=["a bc"]), "merges doesn't fit the tokens"),
        (byte_level(pre="qwen22"), "pre is 'qwen22', which is unknown; did you mean 'qwen2'"),
        (byte_level(pre=2), "pre must be of type str"),
        (byte_level(eos_token_id=999), "eos_token_id is 999, and there are 259 tokens"),
        (byte_level(eot_token_id=-2), "eot_token_id is -2"),
        (byte_level(bos_token_id="x"), "bos_token_id must be of type int, got 'x'"),
        (byte_level(add_bos_token=True), "bos_token_id is missing"),
        (byte_level(add_eos_token=1), "add_eos_token must be of type bool, got 1"),
        (scored(add_space_prefix="no"), "add_space_prefix must be of type bool"),
        (scored() | {"tokenizer.chat_template": 3}, "tokenizer.chat_template must be UTF-8, got 3"),
        (scored() | {"tokenizer.chat_template.x": "a\udc80"}, "tokenizer.chat_template.x must be UTF-8"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_with_the_key(metadata, said):
    with pytest.raises(ModelError) as caught:
        load_gguf_tokenizer(metadata, NAME)
    assert str(caught.value).startswith(f"{NAME}: tokenizer.")
    assert said in str(caught.value)


def test_a_file_without_a_split_takes_the_default_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="kvq"):
        assert pieces(byte_level("1 2", pre=None), "12") == pieces(byte_level("1 2", pre="default"), "12")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NAME in caplog.text
    assert "tokenizer.ggml.pre" in caplog.text


def test_many_tokens_are_read_in_little_time():
    words = [f"{SPACE}w{number:x}" for number in range(20_000)]
    parts = sorted({word[:end] for word in words for end in range(2, len(word))}, key=len)
    began = time.process_time()
    load_gguf_tokenizer(scored(*parts, *words), NAME)
    assert time.process_time() - began < 2  # a few hundredths; a second in 262,144 of Gemma 3
