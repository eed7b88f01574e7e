"""Parts of samples hold each token once, and padding where there is none; labels are shifted before the cut."""

import pytest
import torch

from torchacc.parallel.sequence_cut import SequenceCut, next_labels


@pytest.mark.parametrize(("length", "num_parts"), [(8, 2), (13, 4), (9, 4), (1, 4), (5, 1)])
@pytest.mark.parametrize("more", [(), (3,)])
def test_parts_are_of_one_length_and_give_the_whole_again(length, num_parts, more):
    whole = torch.arange(1, 1 + 2 * length * max(1, sum(more))).view(2, length, *more)
    cuts = [SequenceCut(length, num_parts, index) for index in range(num_parts)]
    parts = [cut.part(whole, -7) for cut in cuts]
    assert {part.shape for part in parts} == {(2, cuts[0].part_length, *more)}
    assert cuts[0].is_padded == (length % num_parts > 0)
    joined = torch.cat(parts, 1)
    assert torch.equal(cuts[0].without_padding(joined), whole)
    assert (joined[:, length:] == -7).all()


def test_each_token_has_the_label_of_the_next():
    assert next_labels(torch.tensor([[1, -100, 3], [4, 5, 6]])).tolist() == [[-100, 3, -100], [5, 6, -100]]
