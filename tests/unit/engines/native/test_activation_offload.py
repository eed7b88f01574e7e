import pytest
import torch
from torch import nn

from torchacc.engines.native.activation_offload import SaveActivationsOnHost


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


def test_activations_are_packed_and_weights_are_left():
    context = SaveActivationsOnHost()
    weight, activation = make_model()[0].weight, torch.randn(3, 4)
    for own in (weight, weight.t(), weight[:2]):
        assert context.pack_hook(own) is own
        assert context.unpack_hook(own) is own
    packed = context.pack_hook(activation)
    assert not isinstance(packed, torch.Tensor)
    assert torch.equal(context.unpack_hook(packed), activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_the_same(dtype):
    x, gradients = torch.randn(3, 4), []
    for context in (SaveActivationsOnHost(), torch.enable_grad()):
        model = make_model()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32), context:
            output = model(x)
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
