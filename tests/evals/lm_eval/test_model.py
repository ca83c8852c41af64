"""lm-eval's tasks over kvq's engine, against lm-eval's own `hf` model over the same weights."""

import copy
import importlib
import json
import logging
import random
import re
import sys
from pathlib import Path

import pytest

import kvq
from kvq.errors import ConfigError, RequestError
from kvq.evals import default_text

pytest.importorskip("lm_eval")

from lm_eval import evaluate, simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvq.evals.lm_eval.loading import load_tasks, task_metrics
from kvq.evals.lm_eval.model import KvqLM
from kvq.evals.lm_eval.tasks import LMEvalPlan, measure_tasks, run_tasks

TINY = Path(kvq.__file__).parent / "models" / "tiny"
TEXT = default_text().text
WINDOW = 96  # tokens; short, so that texts are cut and roll

MULTIPLE_CHOICE = """
task: mini_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
GENERATE = """
task: mini_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [".", "\\n\\n"], max_gen_toks: 16, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ROLLING = """
task: mini_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}{{choices[answer]}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
TASKS = ["mini_choice", "mini_generate", "mini_rolling"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of three tasks over one small JSON dataset: questions cut out of a real text."""
    import datasets

    path = tmp_path_factory.mktemp("tasks")
    rng = random.Random(5)
    docs = []
    for i in range(6):
        at = rng.randrange(len(TEXT) - 2000)
        end = at + rng.randrange(20, 700)
        choices = [TEXT[end : end + rng.randrange(2, 60)], " the", " 日本語 naïve", " of the object"]
        docs.append({"question": TEXT[at:end] + " " * (i % 3), "choices": choices, "answer": i % 4})
    data = path / "data.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    for name, text in zip(TASKS, (MULTIPLE_CHOICE, GENERATE, ROLLING), strict=True):
        (path / f"{name}.yaml").write_text(text.replace("DATA", str(data)), encoding="utf-8")
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(path / "cache"))
    yield path
    patch.undo()


@pytest.fixture(scope="module")
def llm(tiny):
    with kvq.LLM(tiny, "fp32", kv_memory="64MiB") as engine:
        yield engine


@pytest.fixture(scope="module")
def lm(llm):
    return KvqLM(llm)


@pytest.fixture(scope="module")
def make_hf():
    """lm-eval's own model over the same weights in fp32."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    made = {}

    def make(max_length):
        if max_length not in made:
            made[max_length] = HFLM(
                str(TINY), device="cpu", dtype="float32", batch_size=1, max_length=max_length
            )
        return made[max_length]

    return make


@pytest.fixture
def few_tasks(monkeypatch):
    """Only tasks of the folder given: listing lm-eval's own takes seconds."""
    import lm_eval.tasks

    def manager(**options):
        return TaskManager(**options | {"include_defaults": False})

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)


def requests(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def files(folder):
    return [str(folder / f"{name}.yaml") for name in TASKS]


def assert_close(found, wanted):
    assert len(found) == len(wanted)
    for (logprob, is_greedy), (other, other_is_greedy) in zip(found, wanted, strict=True):
        assert logprob == pytest.approx(other, abs=1e-3)
        assert is_greedy == other_is_greedy


@pytest.mark.parametrize(("window", "limit"), [(None, 3), (WINDOW, 6)])
def test_tasks_give_what_lm_evals_own_model_gives(folder, llm, make_hf, window, limit):
    for name, loaded in load_tasks(files(folder)):
        results = []
        for lm in (KvqLM(llm, max_length=window), make_hf(window)):
            results.append(evaluate(lm, loaded, limit=limit, bootstrap_iters=0, log_samples=True))
        ours, theirs = results
        task = Path(name).stem
        for one, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            if task == "mini_generate":
                assert one["resps"] == other["resps"]
                continue
            for [found], [wanted] in zip(one["resps"], other["resps"], strict=True):
                if task == "mini_choice":
                    assert_close([found], [wanted])
                else:
                    assert found == pytest.approx(wanted, abs=1e-3)
        for metric, value in theirs["results"][task].items():
            exact = metric.startswith(("acc", "exact"))
            found = ours["results"][task][metric]
            assert found == value if exact or isinstance(value, str) else found == pytest.approx(value, 1e-5)


def test_odd_requests_in_any_order_score_as_in_lm_evals_own_model(llm, make_hf):
    rng = random.Random(0)
    pairs = [
        ("", "hello"),
        ("", " The"),
        ("The answer is   ", "42"),
        ("x  \n ", "yes"),
        ("☃ na", "ïve 日 🎉"),
    ]
    for _ in range(8):
        at = rng.randrange(len(TEXT) - 1000)
        context = TEXT[at : at + rng.randrange(1, 500)]
        pairs += [(context, " " + TEXT[i : i + 25]) for i in range(at, at + 30, 10)]
    pairs += [("x" * 200, TEXT[:150]), ("import", TEXT[4000:4180])]  # as long as the window, nearly
    rng.shuffle(pairs)
    lm = KvqLM(llm, max_length=WINDOW)
    ours = lm.loglikelihood(requests("loglikelihood", pairs))
    assert_close(ours, make_hf(WINDOW).loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True))
    assert_close(lm.loglikelihood(requests("loglikelihood", pairs[::-1])), ours[::-1])


def test_what_greedy_decoding_writes_is_greedy(lm, make_hf):
    context = TEXT[3000:3200]
    [text] = lm.generate_until(requests("generate_until", [(context, {"until": [], "max_gen_toks": 8})]))
    pairs = [(context, text), (context, text + " zebra"), (context, text[:1])]
    answers = lm.loglikelihood(requests("loglikelihood", pairs))
    assert_close(answers, make_hf(None).loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True))
    assert [is_greedy for _, is_greedy in answers[:2]] == [True, False]


def test_inputs_that_fill_the_whole_context_score_as_in_lm_evals_own_model(tiny, make_hf):
    with kvq.LLM(tiny, "fp32", kv_memory="64MiB", max_context=WINDOW) as engine:
        texts = requests("loglikelihood_rolling", [(TEXT[:900],), ("",), ("short",)])
        found = KvqLM(engine).loglikelihood_rolling(texts)
        pairs = requests("loglikelihood", [(TEXT[:900], " and"), (TEXT[900:1900], TEXT[1900:1960])])
        assert_close(
            KvqLM(engine).loglikelihood(pairs), make_hf(WINDOW).loglikelihood(pairs, disable_tqdm=True)
        )
    assert found == pytest.approx(make_hf(WINDOW).loglikelihood_rolling(texts), abs=1e-3)
    assert found[1] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"until": ["the", "es"], "max_gen_toks": 30},
        {"until": "\n", "max_gen_toks": 30, "temperature": 0.0},
        {"until": [], "max_new_tokens": 9},
        {"until": ["<|endoftext|>", "("], "max_gen_toks": 40, "repetition_penalty": 1.3},
    ],
)
def test_generated_texts_are_those_of_lm_evals_own_model(llm, make_hf, options):
    contexts = [TEXT[at : at + length] for at, length in ((0, 5), (700, 80), (9000, 600))]
    asked = [(context, options) for context in contexts]
    hf = make_hf(WINDOW)
    wanted = hf.generate_until(requests("generate_until", copy.deepcopy(asked)), disable_tqdm=True)
    lm = KvqLM(llm, max_length=WINDOW)
    assert lm.generate_until(requests("generate_until", asked)) == wanted
    shuffled = [asked[i] for i in (2, 0, 1)]
    assert lm.generate_until(requests("generate_until", shuffled)) == [wanted[i] for i in (2, 0, 1)]


def test_sampling_is_repeatable_and_differs_between_repeats(lm):
    options = {
        "until": [],
        "max_gen_toks": 12,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 0,
    }
    asked = requests("generate_until", [(TEXT[:200], options)] * 3)
    first = lm.generate_until(asked)
    assert lm.generate_until(asked) == first
    assert len(set(first)) > 1


def test_continuations_of_one_context_compute_it_once(tiny):
    with kvq.LLM(tiny, "fp32", kv_memory="64MiB") as engine:
        context = TEXT[:1200]
        pairs = [(context, f" {word}") for word in ("alpha", "beta", "gamma", "delta", "the")]
        KvqLM(engine).loglikelihood(requests("loglikelihood", pairs))
        counters = engine.core.scheduler.counters
        computed = counters.prompt_tokens - counters.cached_tokens
        assert computed < counters.prompt_tokens / 5 + 5 * (engine.model.layout.block_size + 4)


def test_a_chat_template_is_the_tokenizers(lm, make_hf):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(chat) == make_hf(None).apply_chat_template(chat)
    said = [*chat, {"role": "assistant", "content": "Hel"}]
    assert lm.apply_chat_template(said, add_generation_prompt=False).rstrip().endswith("Hel")
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    assert "/" not in lm.tokenizer_name


def test_a_template_without_system_messages_gets_none(lm, monkeypatch, caplog):
    refuses = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m['content'] }}{% endfor %}"  # noqa: E501
    monkeypatch.setattr(lm.tokenizer, "chat_template", refuses)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(chat) == "Hi"
    monkeypatch.setattr(lm.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        lm.apply_chat_template(chat)


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (("The", TEXT[:2000]), "longer than the context of 96 tokens"),
        (("The", ""), "no tokens of its own"),
        (("", ""), "no tokens of its own"),
        (("The \ud800", "x"), "not valid Unicode"),
    ],
)
def test_pairs_that_can_not_be_scored_are_refused(llm, pair, says):
    with pytest.raises(RequestError, match=says):
        KvqLM(llm, max_length=WINDOW).loglikelihood(requests("loglikelihood", [("a", " b"), pair]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"until": [], "max_gen_toks": WINDOW}, "below the context of 96"),
        ({"until": [], "max_gen_toks": 4, "num_beams": 3}, "num_beams"),
        ({"until": [], "max_gen_toks": 4, "do_sample": True}, "temperature above 0"),
        ({"until": [], "max_gen_toks": 4, "typical_p": 0.5}, "no typical_p"),
    ],
)
def test_generation_options_that_can_not_be_followed_are_refused(llm, options, says):
    with pytest.raises(RequestError, match=says):
        KvqLM(llm, max_length=WINDOW).generate_until(requests("generate_until", [("x", options)]))


def test_a_pool_too_small_for_a_request_is_said(tiny):
    with kvq.LLM(tiny, "fp32", num_blocks=2) as engine, pytest.raises(RequestError, match="can never fit"):
        KvqLM(engine).loglikelihood(requests("loglikelihood", [(TEXT[:1500], " x")]))


def test_a_window_beyond_the_engines_context_is_refused(llm):
    with pytest.raises(ConfigError, match="1 to 4096"):
        KvqLM(llm, max_length=5000)


def test_rows_of_several_formats_and_tasks(folder, tiny, llm):
    calls = []
    with kvq.LLM(tiny, "int2_g32", kv_memory="64MiB") as other:
        rows = run_tasks(
            {"fp32": llm, "int2_g32": other},
            files(folder),
            LMEvalPlan(limit=5),
            progress=lambda *call: calls.append(call),
        )
    found = {(row.kv, row.task, row.metric): row for row in rows}
    assert {row.kv for row in rows} == {"fp32", "int2_g32"}
    assert [row.task for row in rows] == sorted(row.task for row in rows)  # in the order asked for
    assert {row.samples for row in rows} == {5}
    bits = [found[kv, "mini_rolling", "bits_per_byte"] for kv in ("fp32", "int2_g32")]
    assert bits[0].value < bits[1].value
    assert bits[0].higher_is_better is False
    accuracy = found["fp32", "mini_choice", "acc"]
    assert accuracy.stderr > 0
    assert accuracy.filter == "none"
    assert all(row.seconds > 0 for row in rows)
    assert ("int2_g32", files(folder)[0], 20, 20) in calls


def test_every_format_is_asked_the_same_with_the_same_examples(folder, tiny, monkeypatch):
    asked = []
    real = KvqLM.loglikelihood

    def noted(lm, requests, **options):
        asked.append((lm.llm.model.recipe.name, [request.args for request in requests]))
        return real(lm, requests, **options)

    monkeypatch.setattr(KvqLM, "loglikelihood", noted)
    plan = LMEvalPlan(limit=4, num_fewshot=2)
    models = [tiny.with_kv(kv) for kv in ("fp32", "int4")]
    loaded = load_tasks(files(folder)[:1])
    rows = measure_tasks(models, loaded, plan, kv_memory="64MiB")
    assert [kv for kv, _ in asked] == ["fp32", "int4"]
    assert asked[0][1] == asked[1][1]
    assert [(row.kv, row.metric) for row in rows] == [
        (kv, metric) for kv in ("fp32", "int4") for metric in task_metrics(loaded)["mini_choice"]
    ]


def test_simple_evaluate_takes_the_model(folder, lm, monkeypatch):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds
    manager = TaskManager(include_defaults=False)
    tasks = files(folder)[:1]
    results = simple_evaluate(model=lm, tasks=tasks, limit=3, bootstrap_iters=0, task_manager=manager)
    assert results["n-samples"]["mini_choice"]["effective"] == 3
    assert 0 <= results["results"]["mini_choice"]["acc,none"] <= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("task: [", "broken.yaml can't be loaded"),
        ("- a list", "broken.yaml can't be loaded"),
        ("nothing: here", "broken.yaml can't be loaded"),
        ("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.json}", "current folder"),
        (MULTIPLE_CHOICE.replace("{{question}}", "{{ 1 / (1 - answer) }}"), "failed: ZeroDivisionError"),
        (MULTIPLE_CHOICE.replace("multiple_choice", "telepathy"), "telepathy"),
        (
            "task: hub\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: multiple_choice",
            "network",
        ),
        (MULTIPLE_CHOICE + "unsafe_code: true", "runs code that the model wrote"),
    ],
)
def test_a_task_file_that_can_not_be_run_is_a_request_error(folder, tmp_path, llm, text, says):
    path = tmp_path / "broken.yaml"
    path.write_text(text.replace("DATA", str(folder / "data.jsonl")))
    with pytest.raises(RequestError, match=says):
        run_tasks({"fp32": llm}, [str(path)], LMEvalPlan(limit=2))


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("mini.yaml", {}, "there is no task file"),
        ("mini_choise", {"include_path": "."}, "did you mean 'mini_choice'"),
        ("nothing_*", {"include_path": "."}, "no task 'nothing_"),
        ("tests", {"include_path": "nowhere"}, "include_path must be a folder"),
    ],
)
@pytest.mark.usefixtures("few_tasks")
def test_unknown_tasks_are_refused_with_near_names(folder, llm, task, options, says, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(RequestError, match=says):
        run_tasks({"fp32": llm}, [task], LMEvalPlan(**options))


@pytest.mark.usefixtures("few_tasks")
def test_names_and_patterns_are_found_in_a_folder(folder):
    names = [name for name, _ in load_tasks(["mini_r*", "mini_choice"], include_path=folder)]
    assert names == ["mini_rolling", "mini_choice"]


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "kvq.evals.lm_eval.model")
    with pytest.raises(ConfigError, match=r"pip install '\.\[eval\]'"):
        importlib.import_module("kvq.evals.lm_eval.model")


def test_only_these_modules_import_lm_eval():
    importing = {
        path.name
        for path in Path(kvq.__file__).parent.rglob("*.py")
        if re.search(r"^\s*(import|from) lm_eval\b", path.read_text("utf-8"), re.MULTILINE)
    }
    assert importing == {"loading.py", "model.py", "tasks.py"}
