"""Parts of samples hold each token once, and padding where there is none; labels are shifted before the cut."""

import pytest
import torch

from torchacc.parallel.sequence_cut import SequenceCut, head_parts, in_order, next_labels, pieces_of

CUTS = [
    (8, 2, 1),
    (13, 4, 1),
    (9, 4, 1),
    (1, 4, 1),
    (5, 1, 1),
    (16, 4, 2),
    (13, 4, 4),
    (1, 6, 2),
    (31, 6, 2),
    (9, 6, 3),
]


@pytest.mark.parametrize(("length", "num_parts", "num_groups"), CUTS)
@pytest.mark.parametrize("more", [(), (3,)])
def test_parts_are_of_one_length_and_give_the_whole_again(length, num_parts, num_groups, more):
    whole = torch.arange(1, 1 + 2 * length * max(1, sum(more))).view(2, length, *more)
    cuts = [SequenceCut(length, num_parts, index, num_groups) for index in range(num_parts)]
    parts = [cut.part(whole, -7) for cut in cuts]
    assert {part.shape for part in parts} == {(2, cuts[0].part_length, *more)}
    joined = torch.cat(parts, 1)
    assert torch.equal(cuts[0].without_padding(joined), whole)
    assert cuts[0].is_padded == bool((joined == -7).any()) == (joined.shape[1] > length)


@pytest.mark.parametrize(("length", "num_parts", "num_groups"), CUTS)
def test_groups_have_the_rows_of_a_mask_that_are_of_their_queries(length, num_parts, num_groups):
    mask, size = torch.ones(length, length, dtype=torch.bool).tril()[None, None], num_parts // num_groups
    rows = []
    for group in range(num_groups):
        cuts = [SequenceCut(length, num_parts, index, num_groups) for index in range(group * size, (group + 1) * size)]
        tokens = torch.cat([torch.tensor([*span]) for cut in cuts for span in cut.spans])
        expected = [mask[0, 0, token] if token < length else torch.ones(length).bool() for token in tokens]
        assert torch.equal(cuts[0].queries(mask)[0, 0], torch.stack(expected))
        rows.append(cuts[0].queries(mask))
    assert torch.equal(in_order(torch.cat(rows, 2), num_groups, 2)[:, :, :length], mask)


def test_groups_of_a_causal_mask_have_as_much_to_compute():
    assert [pieces_of(group, 3) for group in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [span for index in range(4) for span in SequenceCut(16, 4, index, 2).spans] == [
        range(4),
        range(12, 16),
        range(4, 8),
        range(8, 12),
    ]


@pytest.mark.parametrize(
    ("heads", "devices", "expected"), [([8], 4, 4), ([6], 4, 2), ([1], 4, 1), ([4, 6], 4, 2), ([2], 6, 2)]
)
def test_heads_are_spread_over_as_many_devices_as_divide_them(heads, devices, expected):
    assert head_parts(heads, devices) == expected
    assert head_parts([2 * each for each in heads], devices, tensor_parallel=2) == expected


def test_each_token_has_the_label_of_the_next():
    assert next_labels(torch.tensor([[1, -100, 3], [4, 5, 6]])).tolist() == [[-100, 3, -100], [5, 6, -100]]
