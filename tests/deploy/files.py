"""What deploy/ holds, and which metrics it asks for."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy"
_WORDS = {"by", "on", "without", "ignoring", "group_left", "group_right", "bool", "and", "or", "unless"}
_LISTS = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAME = re.compile(r"(?<![\w:$])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])")


def load(path: str) -> Any:
    """The one YAML document of a file."""
    [document] = load_all(path)
    return document


def load_all(path: str) -> list[Any]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all((FOLDER / path).read_text(encoding="utf8")))


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    return set(_NAME.findall(_LISTS.sub(" ", bare))) - _WORDS


def rule_expressions() -> dict[str, str]:
    """Expressions of recording rules and alerts by name."""
    rules = [
        rule
        for file in ("rules.yml", "alerts.yml")
        for group in load(f"prometheus/{file}")["groups"]
        for rule in group["rules"]
    ]
    return {rule.get("record") or rule["alert"]: rule["expr"] for rule in rules}


def dashboard_expressions() -> list[str]:
    """Everything that the dashboard asks Prometheus."""
    board = json.loads((FOLDER / "grafana/kvq.json").read_text(encoding="utf8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [entry["expr"] for entry in board["annotations"]["list"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            queries.append(re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])[1])
    return queries


def scaling_names() -> set[str]:
    """Metrics that the autoscaler of `kvq serve` reads, and the adapter for it."""
    rules = {
        rule["name"]["as"]: rule["seriesQuery"] for rule in load("kubernetes/adapter.yaml")["rules"]["custom"]
    }
    metrics = load("kubernetes/autoscaler.yaml")["spec"]["metrics"]
    scaled = {metric["pods"]["metric"]["name"] for metric in metrics}
    return scaled | {name for adapted in scaled for name in names_in(rules[adapted])}


def all_names() -> set[str]:
    """Every metric that something in deploy/ reads and nothing there records, but Prometheus' own."""
    rules = rule_expressions()
    read = {name for text in [*rules.values(), *dashboard_expressions()] for name in names_in(text)}
    return (read | scaling_names()) - set(rules) - {"up"}
