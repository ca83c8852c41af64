"""Tokenizers made from GGUF files, compared with llama.cpp's on a thousand texts.

    npm install --ignore-scripts node-llama-cpp@3.21.1  # and Node.js 20 or later
    python -m benchmarks.gguf_tokenizers MODEL.gguf... --modules node_modules [--texts FILE...] [--out FILE]

A third of the texts are cut from this repository and from `--texts`, such as WikiText; the others are
mixtures of languages, emoji, white space, digits, signs, control tokens and any code points.
`--transformers` also compares with what transformers makes of the same file (it needs the package gguf).

Ids are compared twice: spellings of control tokens count, or are plain text. Texts that differ only by design
are counted apart: llama.cpp takes some spellings for control tokens by name, against the file (`BY_NAME`),
and kvq reads what a model's chat template writes as plain text if a user writes it, although the file lets it
count. Runs of spaces differ in transformers (`BY_SPACES`).
"""

# ruff: noqa: RUF001 - texts in many scripts

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvq.evals.report.results import envelope, write_json
from kvq.models.gguf.header import read_gguf_header
from kvq.models.gguf.tokenizer import load_gguf_tokenizer
from kvq.models.gguf.vocabulary import CONTROL
from kvq.models.loading.control_tokens import ControlTokens

COUNT, LOADS, LARGEST = 1000, 5, 2000
BY_NAME = ("</s>",)  # to llama.cpp, control tokens in any file
BY_SPACES = ("▁", " " * 32)  # transformers merges SentencePiece's runs of spaces, and reads its sign for one
SCRIPT = """
import {readFileSync} from "node:fs";
const asked = JSON.parse(readFileSync(0, "utf8"));
const {getLlama, LlamaLogLevel} = await import(asked.library);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: asked.model, vocabOnly: true});
const ids = asked.texts.map((text) => [true, false].map((special) => [...model.tokenize(text, special)]));
process.stdout.write(JSON.stringify({ids, release: llama.llamaCppRelease.release}), () => process.exit(0));
"""
SENTENCES = """
The quick brown fox doesn't jump; it's over the lazy dog's 3 kennels. WE'LL SEE, THEY'VE SAID "NO".
Żółta łódź płynie po wzburzonej rzece, a z nią źdźbło trawy. Příliš žluťoučký kůň úpěl ďábelské ódy.
Größe, Übermaß & Straße: 12.345,67 € für „alles“. L’œuvre naïve coûte 8 €, n’est-ce pas ? Ça va où ?
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío; añoraba a su querido cachorro. ¿Sí?
Съешь же ещё этих мягких французских булок, да выпей чаю. Жебракують філософи при ґанку церкви.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ὁ ἥλιος ἀνατέλλει· τί ἐστιν;
ابجد هوز حطي كلمن. السَّلَامُ عَلَيْكُمْ وَرَحْمَةُ ٱللَّهِ ١٢٣٤٥٦٧٨٩٠ این یک متن فارسی است با نیم‌فاصله.
דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם עֲלֵיכֶם
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। १२३४५६७८९० বাংলা ভাষায় লেখা একটি বাক্য।
தமிழில் ஒரு வாக்கியம். తెలుగులో ఒక వాక్యం. ಕನ್ನಡ ವಾಕ್ಯ. മലയാളം വാക്യം. ਪੰਜਾਬੀ ਵਾਕ। ગુજરાતી વાક્ય.
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ພາສາລາວ ភាសាខ្មែរ မြန်မာဘာသာ བོད་སྐད་
天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。简体中文没有空格,一二三四五六七八九十。
いろはにほへと ちりぬるを。カタカナ・ヒラガナ、漢字ー「引用」～全角１２３ＡＢＣ!
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 가나다 ㄱㄴㄷ
Vở kịch đã được diễn ở nhiều nơi. Chữ dựng sẵn: ế ộ ữ; rời: e\u0302\u0301 o\u0323\u0302. ışık İĞ
ქართული ენა მშვენიერია. Հայերեն լեզու: አማርኛ ቋንቋ። ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ᠮᠣᠩᠭᠣᠯ ⴰⵎⴰⵣⵉⵖ
f(x) = ∑ₙ xⁿ⁄n! ≈ eˣ, ∀ε>0 ∃δ: |x−a|<δ ⇒ |f(x)−f(a)|<ε; 𝔄𝔅ℭ 𝑥²+𝑦² ½ ⅓ Ⅷ ① ㍿ ﬁ ﬀ
"""
EMOJI = "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇵🇱🇯🇵 ❤️ ☺ 1️⃣ 🫠 🧑🏿‍🚀 ✔️ ©️ 🀄 🂡 🫨 ¯\\_(ツ)_/¯ (╯°□°)╯︵ ┻━┻"
SPACES = (
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u200b",
    "\u0085",
    "\x0b",
    "\u2009",
    "\ufeff",
)
SPELLED = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<s>",
    ),
    *(
        "</s>",
        "<unk>",
        "<|im_",
        "im_end|>",
        "<0x0A>",
        "<0xE2><0x82>",
        "▁",
        "▁▁",
        "Ġ",
        "Ċ",
        "[INST]",
        "<tool_call>",
    ),
    *("<|fim_prefix|>", "<unused42>", "[multimodal]", "[PAD151665]", "<|IM_END|>", "< |im_end|>"),
)


def varied(pieces: list[str], rng: random.Random) -> list[str]:
    """A thousand texts: cut from `pieces`, and made of what tokenizers stumble over."""
    sentences = SENTENCES.strip().split("\n")
    return ["", " ", *(one(pieces, sentences, rng) for _ in range(COUNT - 2))]


def one(pieces: list[str], sentences: list[str], rng: random.Random) -> str:
    """One text: a part of a piece, or a mixture."""

    def part() -> str:
        kind = rng.randrange(8)
        if kind == 0:
            return cut(rng.choice(pieces), rng, 200)
        if kind == 1:
            return cut(rng.choice(sentences), rng, 80)
        if kind == 2:
            return cut(EMOJI, rng, 12)
        if kind == 3:
            return rng.choice(SPACES) * rng.choice((1, 2, 3, 4, 7, 8, 16, 31, 40))
        if kind == 4:
            return rng.choice(("{}", "{:,}", "0x{:x}", "{}.5e-7", "-{}", "{}%", "${}/2")).format(
                rng.randrange(10**9)
            )
        if kind == 5:
            return rng.choice(SPELLED)
        if kind == 6:
            return "".join(chr(scalar(rng)) for _ in range(rng.randrange(1, 9)))
        return rng.choice("'\"`.,;:!?()[]{}<>|/\\@#$%^&*-_=+~ſ’“”…—") * rng.choice((1, 1, 2, 3, 9))

    if rng.random() < 1 / 3:
        return cut(rng.choice(pieces), rng, LARGEST)
    return "".join(part() for _ in range(rng.choice((1, 2, 3, 5, 8, 13, 30))))


def cut(text: str, rng: random.Random, longest: int) -> str:
    """Return a part of a text."""
    begin = rng.randrange(len(text))
    return text[begin : begin + rng.randrange(1, longest)]


def scalar(rng: random.Random) -> int:
    """Return a code point that is no surrogate; half are of the first 1,024."""
    while True:
        found = rng.randrange(rng.choice((0x400, 0x400, 0x3000, 0x10000, 0x20000, 0x110000)))
        if not 0xD800 <= found < 0xE000:
            return found


def read_pieces(paths: list[str]) -> list[str]:
    """Parts of this repository's texts, and as many of the files."""
    root = Path(__file__).resolve().parents[1]
    own = [
        path for kind in ("kvq/**/*.py", "kvq/**/*.cpp", "docs/**/*.md") for path in sorted(root.glob(kind))
    ]
    parts = [
        [
            text[at : at + 10 * LARGEST]
            for path in group
            for text in [path.read_text()]
            for at in range(0, len(text), 10 * LARGEST)
        ]
        for group in (own, [Path(path) for path in paths])
    ]
    rng = random.Random(0)
    return parts[0] + (rng.choices(parts[1], k=len(parts[0])) if paths else [])


def llama_ids(model: str, texts: list[str], modules: Path) -> dict[str, Any]:
    """Ids of llama.cpp with and without control tokens, and its release."""
    library = (modules.resolve() / "node-llama-cpp" / "dist" / "index.js").as_uri()
    asked = json.dumps({"library": library, "model": str(Path(model).resolve()), "texts": texts})
    with tempfile.NamedTemporaryFile("w", suffix=".mjs") as script:
        script.write(SCRIPT)
        script.flush()
        done = subprocess.run(
            ["node", script.name], input=asked, text=True, check=True, stdout=subprocess.PIPE
        )
    answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return answer


def measured(model: str, pieces: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One row: the counts of equal ids, and the seconds that loading takes."""
    (metadata, _), seconds = read_gguf_header(Path(model)), []
    import_module("transformers").PreTrainedTokenizerFast  # imported when it is first asked for  # noqa: B018
    tokenizer: Any = None
    for _ in range(LOADS):
        del tokenizer  # before the clock starts
        began = time.process_time()
        tokenizer = load_gguf_tokenizer(metadata, model)
        seconds.append(time.process_time() - began)
    texts = varied(pieces, random.Random(args.seed))
    told, control = llama_ids(model, texts, args.modules), ControlTokens(tokenizer)
    own = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    plain = [control.encode_plain(text, special=False) for text in texts]
    kinds = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    by_name = {text for text in BY_NAME if kinds.get(text, CONTROL) != CONTROL}
    by_template = {text for text in control.spellings if kinds[text] != CONTROL}
    row = {
        "model": Path(model).name,
        "model_name": metadata.get("general.name"),
        "kind": metadata["tokenizer.ggml.model"],
        "pre": metadata.get("tokenizer.ggml.pre"),
        "tokens": len(kinds),
        "load_s": {"first": seconds[0], "median": median(seconds), "min": min(seconds)},
        "texts": len(texts),
        "characters": sum(map(len, texts)),
        "ids": sum(map(len, own)),
        "llama_cpp": told["release"],
        "with_control_tokens": compared(texts, own, [ids[0] for ids in told["ids"]], by_name),
        "plain": compared(texts, plain, [ids[1] for ids in told["ids"]], by_name | by_template),
    }
    if args.transformers:
        from transformers import AutoTokenizer

        other = AutoTokenizer.from_pretrained(str(Path(model).parent), gguf_file=Path(model).name)
        theirs = [other(text, add_special_tokens=False)["input_ids"] for text in texts]
        row["transformers"] = compared(texts, own, theirs, set(BY_SPACES if row["kind"] == "llama" else ()))
    return row


def compared(
    texts: list[str], own: list[list[int]], theirs: list[list[int]], designed: set[str]
) -> dict[str, int]:
    """Return how many texts have equal ids, differ with a spelling out of `designed`, or differ otherwise.

    Those are shown.
    """
    different = [row for row in zip(texts, own, theirs, strict=True) if row[1] != row[2]]
    strange = [row for row in different if not any(spelling in row[0] for spelling in designed)]
    for text, ours, other in strange[:20]:
        at = next((i for i, pair in enumerate(zip(ours, other, strict=False)) if pair[0] != pair[1]), -1)
        print(f"{text[:60]!r}: from id {at} kvq {ours[at : at + 6]}, other {other[at : at + 6]}")
    return {
        "equal": len(texts) - len(different),
        "by_design": len(different) - len(strange),
        "other": len(strange),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--modules", type=Path, required=True)
    parser.add_argument("--texts", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pieces = read_pieces(args.texts)
    rows = []
    for model in args.models:
        rows.append(measured(model, pieces, args))
        print(json.dumps(rows[-1]))
    if args.out:
        write_json(
            args.out,
            envelope(
                ["python", "-m", "benchmarks.gguf_tokenizers", *sys.argv[1:]], torch.device("cpu"), rows
            ),
        )


if __name__ == "__main__":
    main()
