"""What logits are computed after: token ids, and nothing that would be taken for them."""

from array import array

import numpy as np
import pytest
import torch

from kvq.errors import RequestError

IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "given",
    [
        [True],
        [1, False],
        [np.True_],
        np.array([True]),
        torch.tensor([True]),
        [1, 2.0],
        [1, "2"],
        "abc",
        b"abc",
        bytearray(b"abc"),
        array("b", IDS),
        {5: 1},
        {5, 6},
        iter(IDS),
        7,
        np.array(7),
        None,
    ],
)
def test_what_is_no_list_of_token_ids_is_refused_in_words(tiny, given):
    with pytest.raises(RequestError, match=r"^token ids are whole numbers in a list, got"):
        tiny.logits(given)


@pytest.mark.parametrize(
    "given", [tuple(IDS), np.array(IDS), torch.tensor(IDS), array("I", IDS), range(5, 8)]
)
def test_token_ids_may_lie_in_any_sequence(tiny, given):
    assert torch.equal(tiny.logits(given), tiny.logits(IDS))
