"""`kvq rollout`: the versions of a running server, through the file beside its configuration."""

import getpass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvq.commands.shared.config_file import read_mapping
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvq.server.models.config import Rollout

_USAGE = "show, stop VERSION, or set NAME VERSION=WEIGHT ..."


@click.command(name="rollout")
@click.argument("config", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("words", nargs=-1, metavar="[show | stop VERSION | set NAME VERSION=WEIGHT ...]")
@click.option("--reason", default="", help="Text for the audit log.")
def command(config: Path, words: tuple[str, ...], reason: str) -> None:
    """Show or change the versions that a server with the configuration FILE gives requests to.

    stop: no new requests for a version, under any name; running ones finish. set: weights of a name's
    versions, 0 for those left out; a stopped version with a weight goes on. The server follows within a
    second. FILE.audit.jsonl records every change.
    """
    from kvq.server.models.config import read_entries, read_rollouts
    from kvq.server.models.state import StateFile

    given, file = read_mapping(config), StateFile(config)
    models = [entry.name for entry, _ in read_entries(config, given.get("models"))]
    rollouts = read_rollouts(config, given.get("rollouts"), models)
    by = f"operator {getpass.getuser()}"
    match words:
        case () | ("show",):
            pass
        case ("stop", version):
            if version not in models:
                raise ConfigError(unknown("version", version, models))
            file.stop(version, rollouts, by, reason)
        case ("set", name, *weights) if weights:
            rollout = _rollout(rollouts, name)
            file.set_weights(rollout, _weights(rollout, weights), by, reason)
        case _:
            raise click.UsageError(f"after FILE comes {_USAGE}; got {' '.join(words)!r}")
    state = file.read()
    for rollout in rollouts:
        shown = " ".join(f"{version}={weight:g}" for version, weight in state.of(rollout).items())
        echo(f"{rollout.name}: {shown}")
    if state.stopped:
        echo(f"stopped: {', '.join(state.stopped)}")


def _rollout(rollouts: "Sequence[Rollout]", name: str) -> "Rollout":
    for rollout in rollouts:
        if rollout.name == name:
            return rollout
    raise ConfigError(unknown("name", name, [rollout.name for rollout in rollouts]))


def _weights(rollout: "Rollout", words: "Sequence[str]") -> dict[str, float]:
    """Return the weights in words such as `chat-v1=90`, and 0 for all other versions."""
    from kvq.server.models.config import check_weight, check_weights

    found = dict.fromkeys(rollout.weights, 0.0)
    for word in words:
        version, _, text = word.partition("=")
        if version not in found:
            raise ConfigError(unknown(f"version of {rollout.name}", version, found))
        try:
            weight = float(text)
        except ValueError:
            weight = -1.0
        found[version] = check_weight(weight, f"weight of {word!r}")
    check_weights(found, rollout.name)
    return found
