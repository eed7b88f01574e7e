"""Parts of samples hold each token once, and padding where there is none; labels are shifted before the split."""

import itertools

import pytest
import torch

from torchacc.errors import ConfigError
from torchacc.parallel.sequence_split import SequenceSplit, causal_block, chunks_of, head_parts, in_order, next_labels

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
    splits = [SequenceSplit(length, num_parts, index, num_groups) for index in range(num_parts)]
    parts = [split.part(whole, -7) for split in splits]
    assert {part.shape for part in parts} == {(2, splits[0].part_length, *more)}
    joined = torch.cat(parts, 1)
    assert torch.equal(splits[0].without_padding(joined), whole)
    assert splits[0].is_padded == bool((joined == -7).any()) == (joined.shape[1] > length)


@pytest.mark.parametrize(("length", "num_parts", "num_groups"), CUTS)
def test_groups_have_the_rows_of_a_mask_that_are_of_their_queries(length, num_parts, num_groups):
    mask, size = torch.ones(length, length, dtype=torch.bool).tril()[None, None], num_parts // num_groups
    rows = []
    for group in range(num_groups):
        splits = [
            SequenceSplit(length, num_parts, index, num_groups) for index in range(group * size, (group + 1) * size)
        ]
        tokens = torch.cat([torch.tensor([*span]) for split in splits for span in split.spans])
        expected = [mask[0, 0, token] if token < length else torch.ones(length).bool() for token in tokens]
        assert torch.equal(splits[0].queries(mask)[0, 0], torch.stack(expected))
        rows.append(splits[0].queries(mask))
    assert torch.equal(in_order(torch.cat(rows, 2), num_groups, 2)[:, :, :length], mask)


def test_groups_of_a_causal_mask_have_as_much_to_compute():
    assert [chunks_of(group, 3) for group in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [span for index in range(4) for span in SequenceSplit(16, 4, index, 2).spans] == [
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


def test_a_ring_of_more_devices_leaves_fewer_for_the_heads():
    assert head_parts([8], 8, ring_size=4) == 2
    assert head_parts([8], 8, ring_size=8) == 1
    with pytest.raises(ConfigError, match=r"over 4 devices, and 6 heads can be over 2: leave .* set it to 2"):
        head_parts([6], 4, ring_size=1)


@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_blocks_that_are_seen_are_those_of_a_causal_mask_and_all_of_one_size(num_groups):
    mask = torch.ones(4 * num_groups, 4 * num_groups, dtype=torch.bool).tril()
    for group, source in itertools.product(range(num_groups), repeat=2):
        rows, columns = (
            [token for chunk in chunks_of(each, num_groups) for token in range(2 * chunk, 2 * chunk + 2)]
            for each in (group, source)
        )
        block, seen = mask[rows][:, columns], causal_block(group, source)
        expected = torch.zeros_like(block)
        own, others = (slice(2 * halves.start, 2 * halves.stop) for halves in (seen.queries, seen.keys))
        expected[own, others] = True
        assert torch.equal(block, expected.tril() if seen.is_causal else expected)
        assert seen.is_causal == (group == source)
        assert block.sum() == (10 if seen.is_causal else 8)


def test_each_token_has_the_label_of_the_next():
    assert next_labels(torch.tensor([[1, -100, 3], [4, 5, 6]])).tolist() == [[-100, 3, -100], [5, 6, -100]]
