"""Which format a model's chat template speaks."""

import pytest

from kvq.errors import ConfigError
from kvq.server.tools.formats.registry import FORMATS, find_format
from tests.server.tools.samples import deepseek

TEMPLATES = {
    "hermes": 'within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args-json-object>}',
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n",
    "mistral": "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}",
    "deepseek_v3": "{{'" + deepseek("tool calls begin") + "' + tool['function']['name']}}",
    "pythonic": "Example Format: [func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    "llama3_json": """{{- "Environment: ipython" }} {{- '{"name": "' + name }}{{- '"parameters": ' }}""",
}


@pytest.mark.parametrize("name", FORMATS)
def test_templates_are_recognised(name):
    assert find_format("auto", TEMPLATES[name]).name == name
    assert find_format(name, "").name == name
    assert find_format("none", TEMPLATES[name]) is None


@pytest.mark.parametrize("template", ["", "<|im_start|>", "<tool_call>{{ name }}<arg_key>{{ arguments }}"])
def test_other_templates_are_not(template):
    assert find_format("auto", template) is None


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"no tool call parser 'hermse'; there are auto, none, hermes"):
        find_format("hermse", "")
