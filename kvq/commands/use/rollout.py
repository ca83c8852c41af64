"""`kvq rollout`: the versions of a running server, through the file beside its configuration."""

import getpass
import re
from pathlib import Path

import click

from kvq.commands.shared.config_file import read_mapping
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError, unknown

_WEIGHT = re.compile(r"\d{1,6}(\.\d{1,9})?", re.ASCII)
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

    given = read_mapping(config)
    models = [entry.name for entry, _ in read_entries(config, given.get("models"))]
    rollouts = read_rollouts(config, given.get("rollouts"), models)
    file, by = StateFile(config, rollouts), f"operator {getpass.getuser()}"
    match words:
        case () | ("show",):
            pass
        case ("stop", version):
            if version not in models:
                raise ConfigError(unknown("version", version, models))
            file.stop(version, by, reason)
        case ("set", name, *weights) if weights:
            if name not in rollouts:
                raise ConfigError(unknown("name", name, rollouts))
            file.set_weights(name, _weights(name, [*rollouts[name].weights], weights), by, reason)
        case _:
            raise click.UsageError(f"after FILE comes {_USAGE}; got {' '.join(words)!r}")
    state = file.read()
    for name, rollout in rollouts.items():
        shown = (f"{version}={weight:g}" for version, weight in state.of(name, rollout).items())
        echo(f"{name}: {' '.join(shown)}")
    if state.stopped:
        echo(f"stopped: {', '.join(state.stopped)}")


def _weights(name: str, versions: list[str], words: list[str]) -> dict[str, float]:
    """Return the weights in words such as `chat-v1=90`, and 0 for all other versions of the roll-out."""
    from kvq.server.models.config import check_weights

    found = dict.fromkeys(versions, 0.0)
    for word in words:
        version, _, text = word.partition("=")
        if version not in found:
            raise ConfigError(unknown(f"version of {name}", version, versions))
        if not _WEIGHT.fullmatch(text):
            raise ConfigError(f"a weight is a number of 0 to 999,999, such as {version}=90; got {word!r}")
        found[version] = float(text)
    check_weights(found, name)
    return found
