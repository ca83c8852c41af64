"""Text as it comes: nothing lost, nothing broken, nothing past a stop string, whatever the tokenizer."""

import copy
import functools
import random
from os.path import commonprefix

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvq.engine.params import SamplingParams
from kvq.engine.requests.text import TextStream, _Detokenizer, _StopFinder

BROKEN = "\ufffd"
MARK = "<mark>"  # put between tokens by the reference, and taken out of its text
SAMPLE = (
    "naïve café — 漢字テスト 한국어 🙂🙃👩‍👩‍👧 "
    "plain words, two  spaces\n\n\tand don't . stop\u3000\ufffd 🇺🇳 Привет"
)
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def _byte_level() -> PreTrainedTokenizerFast:
    """BPE whose merges go across characters, so that tokens end one and begin the next."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([SAMPLE, "漢字テスト🙂🙃" * 3, "字漢 🙂 漢" * 3], trainer)
    return _wrap(backend)


def _byte_fallback(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    words = ["▁", "▁▁", "▁plain", "▁a", "a", "b", "word", "s", "\n", "漢", "字", "é", ".", "'", BROKEN, MARK]
    backend = Tokenizer(
        models.Unigram([(t, -2.0) for t in ("<unk>", *BYTES, *words)], unk_id=0, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    return _wrap(backend)


def _word_piece() -> PreTrainedTokenizerFast:
    words = [
        "[UNK]",
        "plain",
        "word",
        "##s",
        "##漢",
        "字",
        "'",
        "s",
        ".",
        ",",
        "don",
        "t",
        "##é",
        "🙂",
        "n't",
    ]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _wrap(backend)


def _word_ends() -> PreTrainedTokenizerFast:
    words = ["plain</w>", "wor", "d</w>", ".</w>", "漢</w>", "a", "é</w>"]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    return _wrap(backend)


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "byte level": _byte_level,
    "llama": lambda: _byte_fallback(decoders.Sequence(LLAMA)),
    "gemma": lambda: _byte_fallback(decoders.Sequence(GEMMA)),
    "metaspace": lambda: _byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "word piece": _word_piece,
    "word ends": _word_ends,
}


@pytest.fixture(scope="module", params=["tiny", *TOKENIZERS])
def tokenizer(request, tiny):
    return tiny.tokenizer if request.param == "tiny" else TOKENIZERS[request.param]()


def _expected(tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """What `decode` adds behind the prompt; complete characters stay, whatever bytes follow them."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    whole = _keep_complete(tokenizer, ids, skip) if _has_bytes(tokenizer) else ids
    text = tokenizer.decode(prompt + whole, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    shared = commonprefix([before, text])  # noqa: RUF071 - by character is meant
    assert shared == before or not before[len(shared) :].strip(BROKEN)
    return text[len(shared) :].replace(MARK, "") if _has_bytes(tokenizer) else text[len(shared) :]


def _keep_complete(tokenizer, ids: list[int], skip: bool) -> list[int]:
    """`ids` with a mark between the complete characters of a stretch of byte tokens and its broken rest."""
    mark, out, run = tokenizer.convert_tokens_to_ids(MARK), [], []
    shown = [i for i in ids if not (skip and i in tokenizer.all_special_ids)]
    for i in [*shown, None]:
        if i is not None and tokenizer.convert_ids_to_tokens(i) in BYTES:
            run.append(i)
            continue
        raw = bytes(int(tokenizer.convert_ids_to_tokens(j)[3:5], 16) for j in run)
        good = len(raw)
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            good = error.start
        out += [*run[:good], mark, *run[good:]] if good < len(run) else run
        out += [] if i is None else [i]
        run = []
    return out


@functools.cache
def _sources(tokenizer) -> tuple[list[int], list[int], list[int]]:
    """All tokens; those that are blank, special or no character; those of a text."""
    vocab = sorted(i for t, i in tokenizer.get_vocab().items() if t != MARK)
    odd = [i for i in vocab if not tokenizer.decode([i], skip_special_tokens=True).strip(f" \n{BROKEN}")]
    return vocab, odd, tokenizer(SAMPLE, add_special_tokens=False)["input_ids"] if len(vocab) > 100 else vocab


@functools.cache
def _has_bytes(tokenizer) -> bool:
    return "<0xFF>" in tokenizer.get_vocab()


def _prompt(tokenizer) -> list[int]:
    """Nothing, or a letter where the text could begin inside a stretch of byte tokens."""
    return tokenizer.convert_tokens_to_ids(["a"]) if _has_bytes(tokenizer) else []


def _random_ids(tokenizer, rng: random.Random, length: int) -> list[int]:
    """Random tokens: any at all, bytes that are no text, the tokens of text, stretches of each."""
    vocab, odd, text = _sources(tokenizer)
    ids: list[int] = []
    while len(ids) < length:
        source = rng.choice([vocab, odd or vocab, text])
        if source is text:
            start = rng.randrange(len(text))
            ids += text[start : start + rng.randrange(1, 30)]
        else:
            ids += rng.choices(source, k=rng.randrange(1, 12))
    return ids[:length]


def test_pieces_and_flush_join_to_what_decode_adds_for_any_tokens(tokenizer):
    rng = random.Random(0)
    for case in range(150):
        skip = case % 3 > 0
        prompt = _random_ids(tokenizer, rng, rng.choice([0, 1, 3, 40]))
        prompt += _prompt(tokenizer)
        ids = _random_ids(tokenizer, rng, rng.randrange(1, 90))
        detokenizer = _Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        joined = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        assert joined == _expected(tokenizer, prompt, ids, skip), (prompt, ids)


def test_each_step_shows_all_but_an_open_character(tokenizer):
    rng = random.Random(1)
    prompt = _prompt(tokenizer)
    for _ in range(20):
        ids = _random_ids(tokenizer, rng, 50)
        detokenizer, shown = _Detokenizer(tokenizer, prompt), ""
        for end, token in enumerate(ids, 1):
            shown += detokenizer.push(token)
            whole = _expected(tokenizer, prompt, ids[:end])
            assert whole.startswith(shown)
            assert len(whole) - len(shown) <= 3
            assert set(whole[len(shown) :]) <= {BROKEN}


def test_text_comes_out_whole_whatever_the_tokens_it_is_cut_into(tokenizer):
    if len(tokenizer) < 100:
        pytest.skip("this tokenizer can't write the text")
    text = SAMPLE.replace(BROKEN, "") * 3
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = _Detokenizer(tokenizer, tokenizer("plain", add_special_tokens=False)["input_ids"])
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces).lstrip() == tokenizer.decode(ids).lstrip()
    assert not any(BROKEN in piece for piece in pieces)


class _Counting:
    """A tokenizer that notes how many tokens each decode was given."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, ids: list[int], **options: bool) -> str:
        self.sizes.append(len(ids))
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("kind", ["text", "odd", "one"])
def test_work_per_token_does_not_grow(tokenizer, kind):
    rng = random.Random(2)
    ids = _random_ids(tokenizer, rng, 600)
    if kind != "text":
        odd = _sources(tokenizer)[1]
        ids = rng.choices(odd, k=600) if kind == "odd" else [odd[0]] * 600
    counting = _Counting(tokenizer)
    detokenizer = _Detokenizer(counting, ids)
    for token in ids:
        detokenizer.push(token)
    assert max(counting.sizes) <= 100
    assert len(counting.sizes) <= 3 * len(ids) + 100


def test_a_character_that_the_prompt_began_belongs_to_the_text(tokenizer):
    if len(tokenizer) < 100:
        pytest.skip("this tokenizer has no tokens for bytes")
    face = tokenizer("a🙂", add_special_tokens=False)["input_ids"][1:]
    if len(face) == 1:
        face = [tokenizer.convert_tokens_to_ids(t) for t in ("ð", "Ł", "Ļ", "Ĥ")]  # its bytes
    first = tokenizer("words a", add_special_tokens=False)["input_ids"]
    detokenizer = _Detokenizer(tokenizer, first + face[:1])
    assert "".join(detokenizer.push(i) for i in face[1:]) == "🙂"


def test_an_open_character_is_not_held_for_ever():
    tokenizer = _byte_level()
    lead, end = tokenizer.convert_tokens_to_ids(["ð", "</s>"])
    detokenizer = _Detokenizer(tokenizer, [])
    assert "".join(detokenizer.push(i) for i in [lead] + [end] * 40) == BROKEN
    literal = tokenizer(BROKEN * 30)["input_ids"]
    shown = "".join(detokenizer.push(i) for i in literal)
    assert 27 <= len(shown) <= 30
    assert shown + detokenizer.flush() == BROKEN * 30


def test_complete_characters_stay_when_a_wrong_byte_follows_them():
    tokenizer = TOKENIZERS["llama"]()
    good, wrong = [BYTES[b] for b in "漢🙂".encode()], [BYTES[0x80], BYTES[0xE6]]
    ids = tokenizer.convert_tokens_to_ids(["▁a", *good, *wrong, "▁plain"])
    assert tokenizer.decode(ids) == "a" + BROKEN * 9 + " plain"
    detokenizer = _Detokenizer(tokenizer, [])
    assert [detokenizer.push(i) for i in ids] == [
        *("a", "", "", "漢", "", "", "", "🙂"),
        *("", "", BROKEN * 2 + " plain"),
    ]


def test_forks_go_on_by_themselves(tokenizer):
    rng = random.Random(3)
    for _ in range(20):
        ids = [_random_ids(tokenizer, rng, 20) for _ in range(3)]
        parent = _Detokenizer(tokenizer, _prompt(tokenizer))
        shared = "".join(parent.push(i) for i in ids[0])
        child = parent.fork()
        texts = [shared, shared]
        for pair in zip(*ids[1:], strict=True):
            texts = [t + d.push(i) for t, d, i in zip(texts, (parent, child), pair, strict=True)]
        texts = [t + d.flush() for t, d in zip(texts, (parent, child), strict=True)]
        assert texts == [_expected(tokenizer, _prompt(tokenizer), ids[0] + tail) for tail in ids[1:]]


def _first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string ends, and which it is."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            return end, max(found, key=len)
    return None


@pytest.mark.parametrize("include_stop", [False, True])
def test_text_ends_at_the_first_stop_string_however_it_is_cut(include_stop):
    rng = random.Random(4)
    for _ in range(1500):
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        text = "".join(rng.choices("abc" if rng.random() < 0.5 else "abcdefgh", k=rng.randrange(40)))
        finder, shown, position, stop = _StopFinder(stops, include_stop), "", 0, None
        found = _first_stop(text, stops)
        while position < len(text) and stop is None:
            size = rng.randrange(5)
            piece, stop = finder.push(text[position : position + size])
            shown, position = shown + piece, min(position + size, len(text))
            if stop is None and not include_stop:
                held = [n for s in stops for n in range(len(s)) if text[:position].endswith(s[:n])]
                assert len(text[:position]) - len(shown) == max(held, default=0)
        shown += finder.flush()
        assert stop == (found[1] if found else None)
        end = found[0] - (0 if include_stop else len(found[1])) if found else len(text)
        assert shown == text[:end]
        assert finder.push("abc") == ("", stop) or not stop


def test_a_stop_string_inside_another_ends_the_text_at_once():
    assert _StopFinder(("abcdX", "bc"), False).push("abcdX") == ("a", "bc")
    assert _StopFinder(("b", "ab"), False).push("xab") == ("x", "ab")  # both end here, "ab" begins first


def test_finder_forks_go_on_by_themselves():
    finder = _StopFinder(("END",), False)
    assert finder.push("so E") == ("so ", None)
    other = finder.fork()
    assert finder.push("ND.") == ("", "END")
    assert other.push("nd.") == ("End.", None)


def _run(tokenizer, text: str, **options) -> tuple[TextStream, str, int]:
    """Push a text's tokens up to the stop string; return the stream, its pieces joined, tokens used."""
    stream, shown, used = TextStream(tokenizer, [], SamplingParams(max_tokens=999, **options)), "", 0
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        used += 1
        shown += stream.push(token)
        if stream.stop is not None:
            break
    shown += stream.finish()
    assert shown == stream.text
    return stream, shown, used


def test_a_stream_ends_at_a_stop_string_of_several_tokens(tiny):
    text = "Some text 漢🙂\n\nUser: more"
    stream, shown, _ = _run(tiny.tokenizer, text, stop=["\n\nUser:", "zzz"])
    assert (stream.stop, shown) == ("\n\nUser:", "Some text 漢🙂")
    assert _run(tiny.tokenizer, text, stop="\n\nUser:", include_stop=True)[1] == "Some text 漢🙂\n\nUser:"
    stream, shown, _ = _run(tiny.tokenizer, text, stop="moreover")
    assert (stream.stop, shown) == (None, text)


def test_stop_strings_count_once_min_tokens_are_there(tiny):
    text = "a b c b c"
    tokens = [tiny.tokenizer.decode(i) for i in tiny.tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert tokens == ["a", " b", " c", " b", " c"]
    assert _run(tiny.tokenizer, text, stop=" b", min_tokens=1)[1:] == ("a", 2)
    assert _run(tiny.tokenizer, text, stop=" b", min_tokens=2)[1:] == ("a b c", 4)
    assert _run(tiny.tokenizer, text, stop=" b c", min_tokens=2)[1:] == ("a", 3)  # begins before, ends after
    assert _run(tiny.tokenizer, text, stop=" b c", min_tokens=3)[1:] == ("a b c", 5)
    assert _run(tiny.tokenizer, text, stop=" b", min_tokens=4)[1:] == (text, 5)


def test_a_hidden_token_counts_but_has_no_text(tiny):
    b = tiny.tokenizer("b", add_special_tokens=False)["input_ids"][0]
    stream = TextStream(tiny.tokenizer, [], SamplingParams(stop="b", min_tokens=2))
    assert [stream.push(b, ends=True), stream.push(0), stream.push(b)] == ["", "", ""]
    assert (stream.stop, stream.text) == ("b", "")


def test_special_tokens_are_shown_on_request(tiny):
    shown = [TextStream(tiny.tokenizer, [], SamplingParams(skip_special_tokens=s)) for s in (True, False)]
    assert [stream.push(0) for stream in shown] == ["", "<|endoftext|>"]


def test_some_special_tokens_may_be_shown_while_others_are_skipped(tiny):
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["[CALL]", "[PAD]"]})
    ids = tokenizer("é[CALL] 東[PAD]a", add_special_tokens=False)["input_ids"]
    [call] = tokenizer.convert_tokens_to_ids(["[CALL]"])

    def shown(**options):
        stream = TextStream(tokenizer, ids[:1], SamplingParams(**options))
        return "".join(map(stream.push, ids)) + stream.finish()

    assert shown(kept_special_ids=[call]) == "é[CALL] 東a"
    assert shown() == "é 東a"
    assert shown(kept_special_ids=[call], skip_special_tokens=False) == "é[CALL] 東[PAD]a"


def test_stream_forks_share_their_past_only(tiny):
    ids = tiny.tokenizer("one two three STOP four", add_special_tokens=False)["input_ids"]
    stream = TextStream(tiny.tokenizer, [], SamplingParams(stop="STOP"))
    for token in ids[:2]:
        stream.push(token)
    other = stream.fork()
    past = stream.text
    for token in ids[2:]:
        stream.push(token)
    assert stream.stop == "STOP"
    assert stream.text == past + " three "
    other.finish()
    assert (other.stop, other.text) == (None, tiny.tokenizer.decode(ids[:2]))


def test_a_way_of_its_own_to_decode_is_used(tiny):
    tokenizer = copy.copy(tiny.tokenizer)
    assert _Detokenizer(tokenizer, [5]).push(40) == tokenizer.decode([5, 40])[len(tokenizer.decode([5])) :]
    tokenizer.decode = lambda ids, **_: "x" * len(ids)
    assert _Detokenizer(tokenizer, [5]).push(40) == "x"

    class Own(type(tiny.tokenizer)):
        def _decode(self, token_ids, **_):
            return "y" * len(token_ids)

    other = copy.copy(tiny.tokenizer)
    other.__class__ = Own
    assert _Detokenizer(other, [5]).push(40) == "y"


def _with_special(tiny, params, *tokens):
    """What is shown of tokens, and the stop string that ended it."""
    stream, shown = TextStream(tiny.tokenizer, [], SamplingParams(**params)), ""
    for token in tokens:
        if stream.stop is None:
            shown += stream.push(token)
    return shown + ("" if stream.stop is not None else stream.finish()), stream.stop


def test_a_stop_string_may_hold_a_special_tokens_text_which_stays_hidden(tiny):
    ids, end = tiny.tokenizer(" the sea", add_special_tokens=False)["input_ids"], tiny.tokenizer.eos_token_id
    mark = tiny.tokenizer.decode([end])
    for stop, shown in (
        (mark, " the sea"),
        (f"sea{mark}", " the "),
        (f"a{mark} the", " the se"),
        (f"{mark}{mark}", " the sea the sea"),
    ):
        tokens = [*ids, end, *ids, end, end, *ids]
        assert _with_special(tiny, {"stop": stop}, *tokens) == (shown, stop)
        text = tiny.tokenizer.decode(tokens)
        shown = text[: text.index(stop) + len(stop)]
        before = shown.removesuffix(stop).replace(mark, "")
        assert _with_special(tiny, {"stop": stop, "include_stop": True}, *tokens) == (before + stop, stop)
    assert _with_special(tiny, {"stop": f"{mark}never"}, *ids, end, *ids) == (" the sea the sea", None)
    assert _with_special(tiny, {"stop": f"{mark}never", "include_stop": True}, *ids, end, *ids)[1] is None
    assert _with_special(tiny, {"stop": mark, "min_tokens": 9}, *ids, end, *ids)[1] is None


def test_a_stop_tokens_text_is_shown_where_stops_are(tiny):
    word = tiny.tokenizer(" the", add_special_tokens=False)["input_ids"][0]
    end = tiny.tokenizer.eos_token_id
    for token in (word, end):
        for include in (True, False):
            params = SamplingParams(stop_token_ids=[token], include_stop=include)
            stream = TextStream(tiny.tokenizer, [], params)
            shown = stream.push(token, ends=True) + stream.finish()
            assert shown == (tiny.tokenizer.decode([token]) if include else "")
    stream = TextStream(tiny.tokenizer, [], SamplingParams(include_stop=True))
    assert stream.push(end, ends=True) + stream.finish() == ""
