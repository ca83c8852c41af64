"""Names of weight formats: what a misspelt one was to be."""

import pytest

from kvq.errors import ConfigError
from kvq.formats.weights import parse_weight_format


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *[("int4_asym_g64", "int4_g64_asym"), ("int4_a8_asym", "int4_asym_a8"), ("INT4", "int4")],
        *[("int4_g64_asm", "int4_g64_asym"), ("int3_chanel", "int3_channel"), ("int4g64", "int4_g64")],
        *[("fp8a8", "fp8_a8"), ("int8_per_head", "int8"), ("itn4_g64", "int4_g64"), ("w4a16", "w4a8")],
    ],
)
def test_a_hint_has_the_words_of_the_name_in_their_order_and_is_a_name(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown weight format '{given}'; did you mean '{meant}'\?"):
        parse_weight_format(given)
    parse_weight_format(meant)


@pytest.mark.parametrize("given", ["", "@@@", None, 5])
def test_what_is_like_no_name_gets_no_hint(given: object) -> None:
    with pytest.raises(ConfigError, match=f"unknown weight format {given!r}; allowed: int8"):
        parse_weight_format(given)  # type: ignore[arg-type]
