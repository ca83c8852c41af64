"""`kvq guard`: what the guard of a running server found."""

import json
from collections.abc import Iterator
from typing import Any

import click

from kvq.commands.chat.client import open_url
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError

_MAX_BYTES = 1 << 26  # of the server's state


@click.command(name="guard")
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--api-key", envvar="KVQ_API_KEY", help="Key of the server; KVQ_API_KEY is better.")
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as JSON.")
def command(url: str, api_key: str | None, as_json: bool) -> None:
    """Tell what the guard of the server at URL found: kvq serve --guard 0.01.

    Exits with 1 after an alert. URL: http://127.0.0.1:8000 unless given.
    """
    try:
        with open_url(url.rstrip("/").removesuffix("/v1"), "/pool", api_key) as response:
            state = json.loads(response.read(_MAX_BYTES))
        picture, totals = state["picture"] or {}, state["totals"] or {}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} is no server of kvq") from error
    found = picture.get("guard")
    if not picture:
        raise ConfigError(f"the engine of {url} is {state['state']}; ask again once it is ready")
    if found is None:
        raise ConfigError(f"the server at {url} has no guard; start it with --guard 0.01")
    formats, has_fallen_back = totals.get("formats") or {}, bool(totals.get("guard_fallback"))
    found["earlier"] = state["guard_alerts"] - found["alerts"]
    if as_json:
        echo(json.dumps(found | {"kv": state["kv"], "formats": formats, "has_fallen_back": has_fallen_back}))
    else:
        for line in _lines(state["kv"], found, formats, has_fallen_back=has_fallen_back):
            echo(line)
    if state["guard_alerts"]:
        raise click.exceptions.Exit(1)


def _lines(
    kv: str, found: dict[str, Any], formats: dict[str, dict[str, int]], *, has_fallen_back: bool
) -> Iterator[str]:
    requests, tokens, failed = found["requests"], found["tokens"], found["failed"]
    yield f"{kv}: {requests:,} requests computed again without quantized KV, {tokens:,} tokens compared"
    if failed:
        yield f"  {failed:,} more could not be computed again; the log tells why"
    if tokens:
        yield f"  {found['same'] / tokens:.1%} of the tokens have the same likeliest successor"
    for what, divergences in (("from {} tokens", found["kl"]), ("of {}", found["kl_by_tenant"])):
        for name, kl in divergences.items():
            yield f"  KL divergence of requests {what.format(name or 'all clients')}: {kl:.2g} nats"
    for name, counts in formats.items():
        yield (
            f"{name}: {counts['requests']:,} requests so far, {counts['running']:,} running, "
            f"{counts['waiting']:,} waiting; {counts['live']:,} of {counts['blocks']:,} blocks in use"
        )
    if found["earlier"]:
        yield f"alerts before the engine was started again: {found['earlier']:,}; the log has them"
    if found["alerts"]:
        yield f"alerts: {found['alerts']:,}; the last one: {found['last_alert']}"
    elif not found["earlier"]:
        yield "no alerts"
    if has_fallen_back:
        yield "new requests get the safer format of --guard-fallback"
