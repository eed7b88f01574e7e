import argparse

import pytest

from torchacc.cli._options import named, path, positive, size


def test_sizes_and_numbers():
    assert size("5GB") == 5 * 10**9
    assert size("1.5 KiB") == 1536
    assert positive("12") == 12


@pytest.mark.parametrize("text", ["", "x", "0", "-1GB", "1XB", "9" * 400 + "GB", "9" * 19 + "GB", "\0", "²"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        size(text)


def test_a_letter_alone_is_no_unit_and_both_that_it_may_mean_are_named():
    with pytest.raises(argparse.ArgumentTypeError, match="'80g' is not a size: write 80GiB .* or 80GB"):
        size("80g")


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "9" * 5000, "²"])
def test_what_is_no_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number from 1 on"):
        positive(text)


@pytest.mark.parametrize("kind", [named, path])
def test_nothing_is_no_name_and_no_path(kind):
    with pytest.raises(argparse.ArgumentTypeError):
        kind("")
