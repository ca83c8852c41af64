"""Watermark policy: decides which texts are marked, from the operator's mode and the request's choice."""

from dataclasses import dataclass, replace
from pathlib import Path

from kvq.engine.params import SamplingParams
from kvq.errors import ConfigError, RequestError, not_one_of
from kvq.watermark.key import Key, read_key
from kvq.watermark.schemes import MODES, Scheme, Tournament, parse_scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class Marking:
    """Watermark settings of an engine that marks some or all texts."""

    mode: str  # one of MODES, except "off"
    scheme: Scheme
    key: Key

    def is_due(self, params: SamplingParams) -> bool:
        """Return True if a request's text must be marked.

        Raises:
            RequestError: the request declines a mandatory mark, or its text can't be marked.
        """
        asks = params.watermark
        if self.mode == "always" and asks is False:
            raise RequestError("watermark can't be false: this engine marks every text; leave the field out")
        if asks is False or (asks is None and self.mode == "asked"):
            return False
        hindrance = self._hindrance(params)
        if hindrance and (asks or self.mode == "always"):
            raise RequestError(hindrance)
        return not hindrance

    def _hindrance(self, params: SamplingParams) -> str:
        """Return the reason why a text can't be marked, or an empty string if it can."""
        if params.beam_width is not None:
            return f"beam search can't be watermarked, got beam_width={params.beam_width}; leave it out"
        if isinstance(self.scheme, Tournament) and params.is_greedy:
            return (
                "a text can't be watermarked by a tournament at temperature 0, which draws nothing; "
                "give a temperature above 0"
            )
        return ""


def check_marking(mode: str, scheme: str, key_file: str | Path | None) -> None:
    """Raise ConfigError unless these options are consistent."""
    if mode not in MODES:
        raise ConfigError(not_one_of("watermark", mode, MODES))
    parse_scheme(scheme)
    if mode == "off" and key_file is not None:
        raise ConfigError(
            "watermark_key_file (--watermark-key-file) is for watermark (--watermark) asked, "
            "unless-declined or always, got off; give one of these, or no key"
        )
    if mode != "off" and key_file is None:
        raise ConfigError(
            f"watermark {mode} (--watermark) needs watermark_key_file (--watermark-key-file), a secret key: "
            f"make one with kvq detect-watermark --new-key FILE"
        )


def read_marking(mode: str, scheme: str, key_file: str | Path | None) -> Marking | None:
    """Return an engine's watermark settings with the key, or None if the engine marks nothing.

    Raises:
        ConfigError: the key can't be read, is too short, or is readable by other users.
    """
    if key_file is None:
        return None
    return Marking(mode=mode, scheme=parse_scheme(scheme), key=read_key(key_file))


def marked(params: SamplingParams, marking: Marking | None) -> SamplingParams:
    """Return `params` with `watermark` set to True if the text must be marked, otherwise unchanged.

    Raises:
        RequestError: the request needs a mark that this engine can't make.
    """
    if marking is None:
        if params.watermark:
            raise RequestError(
                "watermark can't be true: this engine has no key for one; leave the field out, or start it "
                "with --watermark asked and --watermark-key-file"
            )
        return params
    if marking.is_due(params):
        return params if params.watermark else replace(params, watermark=True)
    return params
