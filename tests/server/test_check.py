"""`kvq serve --check` tries the chat template as the server would, and outlives it."""

import re
import shutil

import pytest

from kvq.engine import LLM, SamplingParams
from kvq.errors import RequestError
from kvq.models.describe.resolve import EMBEDDED
from kvq.server.admission.config import ServerConfig
from kvq.server.check import check_config
from tests.server.templates import LOOP

NESTED = "{% if messages %}" * 3000 + "{{ messages[0].content }}" + "{% endif %}" * 3000


@pytest.fixture
def told_of(tmp_path):
    """What is found of a model's chat template; None: it has none."""

    def told_of(template):
        folder = tmp_path / "model"
        shutil.copytree(EMBEDDED["tiny"], folder)
        (folder / "chat_template.jinja").unlink()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        findings = check_config(ServerConfig(model=folder, kv="int4", port=0))
        [found] = [one for one in findings if one.text.startswith("chat template: ")]
        return found

    return told_of


@pytest.mark.parametrize(
    ("template", "says"),
    [
        pytest.param("{% for m in messages %}{{ m.content }}", "TemplateSyntaxError", marks=pytest.mark.long),
        (LOOP, "it takes more than 1.0 s of processor time"),
        (NESTED, "RecursionError"),
        pytest.param("{{ none + 1 }}", "TypeError", marks=pytest.mark.long),
    ],
)
def test_a_template_that_is_broken_says_why(told_of, template, says):
    found = told_of(template)
    assert found.is_error
    assert "broken: for one short message" in found.text
    assert says in found.text


def test_a_template_that_may_refuse_is_not_broken(told_of):
    assert not told_of("{{ raise_exception('a system message comes first') }}").is_error


def test_what_a_template_has_no_place_for_is_told(told_of):
    found = told_of("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert found.level == "warning"
    assert "no place for system messages, tools, calls" in found.text


def test_a_model_without_a_template_is_served_with_a_warning(told_of):
    assert told_of(None).level == "warning"


def test_a_template_that_can_not_be_tried_is_not_called_good(told_of, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere")
    found = told_of("{{ messages[0].content }}")
    assert found.is_error
    assert "could not be tried: prompts can't be read now" in found.text


def test_steps_that_a_small_staging_area_shortens_are_told():
    def told(memory):
        engine = {"kv_memory": memory}
        findings = check_config(ServerConfig(model="tiny", kv="int3_mean+recent=64", port=0, engine=engine))
        assert not any(one.is_error for one in findings)
        return [one.text for one in findings if one.text.startswith("prefill: ")]

    assert told("8MiB")[0] == "prefill: steps take 160 tokens, since those wait in the staging area"
    assert told("1GiB") == ["prefill: a prompt of full context takes 2 steps at least"]


def test_how_many_requests_fit_at_once_is_told_and_a_warning_where_tokens_that_wait_limit_them():
    def told(kv, memory):
        engine = {"kv_memory": memory}
        findings = check_config(ServerConfig(model="tiny", kv=kv, port=0, engine=engine))
        return [(one.level, one.text) for one in findings if one.text.startswith("requests: ")]

    plain = "requests: at once fit, and run out of first: "
    sealed = "75 of 100 tokens (full blocks), 9 of 1000 tokens (full blocks), 2 of 4096 tokens (full blocks)"
    assert told("int4_g32_s8", "8MiB") == [("ok", plain + sealed)]
    [(level, text)] = told("int3_mean+sinks=4+recent=128", "8MiB")
    assert level == "warning"
    assert text.startswith(
        f"{plain}7 of 100 tokens (sinks-32 blocks), 4 of 1000 tokens (full blocks), 1 of 4096"
    )
    assert "raise --kv-memory, lower --max-model-len, or take a --kv format" in text
    [(level, text)] = told("int3_mean+sinks=4+recent=128", "4GiB")
    assert (level, text.count("128 of")) == ("ok", 3)


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("kv", "memory"),
    [
        ("int3+sinks=2048", "8MiB"),
        ("int4_mean", "1MiB"),
        ("int3_mean+recent=4000", "8MiB"),
        ("int3_mean+recent=65536", "8MiB"),
        ("int4_mean+recent=1024", "2MiB"),
        ("int3_mean+sinks=4+recent=128", "500KiB"),
        ("int4_g32_s8", "512KiB"),
        ("int4", "1MiB"),
    ],
)
def test_the_context_that_is_told_is_the_longest_that_is_not_refused(kv, memory):
    engine = {"kv_memory": memory}
    findings = check_config(ServerConfig(model="tiny", kv=kv, port=0, engine=engine))
    [told] = [one.text for one in findings if one.text.startswith("context: ")]
    longest = int(re.match(r"context: the pool holds (\d+) tokens", told)[1])
    with LLM("tiny", kv, **engine) as llm:
        params = SamplingParams(max_tokens=1)
        assert len(llm.generate([[5] * longest], params)) == 1
        with pytest.raises(RequestError, match="can never fit"):
            llm.generate([[5] * (longest + 1)], params)
