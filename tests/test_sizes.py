"""Sizes as people read them: never 0.00 of a unit that is too large."""

import re

import pytest

from kvq import cli
from kvq.errors import ConfigError
from kvq.sizes import binary, count, decimal, dollars, parse_bytes, speed


@pytest.mark.parametrize(
    ("amount", "in_1024", "in_1000"),
    [
        (0, "0 B", "0 B"),
        (1, "1 B", "1 B"),
        (12.5, "12.5 B", "12.5 B"),
        (1023, "1,023 B", "1.02 KB"),
        (1024, "1.00 KiB", "1.02 KB"),
        (23_160_000, "22.09 MiB", "23.16 MB"),
        (100 * 2**20, "100.0 MiB", "104.9 MB"),
        (2**30 - 1, "1.00 GiB", "1.07 GB"),  # not 1,024.00 MiB
        (10**12 - 1, "931.3 GiB", "1.00 TB"),
        (80e9, "74.51 GiB", "80.00 GB"),
        (1e19, "8,881.8 PiB", "10,000.0 PB"),
        (-5e6, "-4.77 MiB", "-5.00 MB"),
    ],
)
def test_the_unit_fits_the_size(amount: float, in_1024: str, in_1000: str) -> None:
    assert (binary(amount), decimal(amount)) == (in_1024, in_1000)


def test_counts_and_speeds() -> None:
    assert [count(n) for n in (12, 5_840_000, 70_553_706_496)] == ["12", "5.84 M", "70.55 B"]
    assert [speed(gb_per_s) for gb_per_s in (0.0042, 41.2)] == ["4.20 MB/s", "41.20 GB/s"]


def test_money() -> None:
    amounts = (None, 0, 1234.5, 12, 0.1, 0.0994, 0.00312)
    assert [dollars(usd) for usd in amounts] == ["-", "0.00", "1,234.50", "12.00", "0.10", "0.099", "0.0031"]


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (0, 0),
        ("512", 512),
        ("2GiB", 2 * 2**30),
        ("512M", 512 * 10**6),
        (" 1.5 g ", 15 * 10**8),
        ("3kb", 3000),
        ("0.5Ti", 2**39),
        (".5 bytes", 0),
        ("900 bytes", 900),
    ],
)
def test_sizes_are_read_as_people_write_them(given: int | str, nbytes: int) -> None:
    assert parse_bytes(given, "it") == nbytes


@pytest.mark.parametrize("given", ["", "GiB", "-1", "1e9", "5 pt", "5iB", "nan", "9" * 400, -1, True, None])
def test_what_is_no_size_is_refused(given: int | str) -> None:
    with pytest.raises(ConfigError, match="it must be a size such as '2GiB' or a number of bytes"):
        parse_bytes(given, "it")


def test_nothing_shown_is_zero_in_its_unit() -> None:
    for amount in (1, 7, 999, 1000, 1024, 123_456, 10**7, 2**40):
        for text in (binary(amount), decimal(amount)):
            assert not text.startswith("0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--model", "tiny", "--gpu", "h100", "--context", "128", "--kv", "int4"),
        ("serve", "--model", "tiny", "--kv", "int4", "--kv-memory", "1MiB", "--check", "--port", "0"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_show_a_small_models_sizes(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    shown, _ = capsys.readouterr()
    assert not stop.value.code
    assert re.search(r"\d [KM]i?B\b", shown), shown
    assert not re.search(r"\b0\.0+ [KMGT]i?B\b", shown), shown
