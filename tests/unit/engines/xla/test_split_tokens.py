import torch
from torch.nn import functional as F

from torchacc.engines.xla.split_tokens import TokensStaySplit


def test_linear_layers_compute_the_same_however_they_are_called():
    tokens, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)

    def calls():
        return [
            F.linear(tokens, weight, bias),
            F.linear(tokens, weight=weight, bias=bias),
            F.linear(input=tokens, weight=weight),
            F.linear(tokens, weight[0]),
        ]

    expected = calls()
    with TokensStaySplit(lambda tensor, are_split: tensor):
        found = calls()
    torch.testing.assert_close(found, expected)
