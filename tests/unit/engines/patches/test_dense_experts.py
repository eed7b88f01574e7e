import copy
import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchacc.engines.patches import dense_experts

transformers = pytest.importorskip("transformers", minversion="5")
SIZE = {"hidden_size": 8, "intermediate_size": 6, "moe_intermediate_size": 6, "num_attention_heads": 2}
COUNTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
FAMILIES = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "gpt_oss": "GptOssExperts",
}
OTHERS = {"aria_text": "AriaExperts", "nemotron_h": "NemotronHExperts"}
"""Of which weights lie transposed; without a gate."""


def make(family):
    config = transformers.AutoConfig.for_model(family, **SIZE, **COUNTS)
    config._experts_implementation = "eager"
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    experts = getattr(module, {**FAMILIES, **OTHERS}[family])(config)
    torch.manual_seed(3)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def compute_all(experts, hidden, chosen, weights):
    is_chosen, shares = dense_experts.shares(experts.num_experts, chosen, weights)
    return dense_experts.compute_all(experts, hidden, is_chosen, shares, lambda tensor: tensor)


def inputs():
    torch.manual_seed(5)
    hidden, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])  # never the last
    return hidden, chosen, weights


def trained(experts, compute=lambda experts, *args: experts(*args)):
    hidden, chosen, weights = inputs()
    output = compute(experts, hidden, chosen, weights)
    output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, **gradients}


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, output.numel() if isinstance(output, torch.Tensor) else 0)
        return output


@pytest.mark.parametrize("family", FAMILIES)
def test_the_outputs_and_gradients_are_those_of_transformers(family):
    experts = make(family)
    torch.testing.assert_close(trained(experts, compute_all), trained(copy.deepcopy(experts)))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_comes_of_an_expert_that_no_token_has_chosen(family):
    experts = make(family)
    experts.gate_up_proj.data[3] = 3e38
    hidden, chosen, weights = inputs()
    assert not (hidden @ torch.full((8,), 3e38)).isfinite().all(), "or it would not overflow"
    output = compute_all(experts, hidden, chosen, weights)
    output.square().sum().backward()
    for tensor in (output, hidden.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())):
        assert tensor.isfinite().all()
    assert not experts.gate_up_proj.grad[3].any()


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_no_token_gets_a_copy_of_weights(family):
    experts = make(family)
    expected = trained(copy.deepcopy(experts))
    experts.config._experts_implementation = dense_experts.COPYING
    weights = max(parameter.numel() for parameter in experts.parameters())
    with dense_experts.without_copies(), Largest() as largest:
        torch.testing.assert_close(trained(experts), expected)
    assert largest.numel == weights
    with Largest() as largest:
        experts(*inputs())
    assert largest.numel > weights, "or there is nothing to show"


def test_a_few_tokens_need_the_weights_of_their_experts_only():
    experts = make("mixtral")
    experts.config._experts_implementation = dense_experts.COPYING
    hidden, chosen, weights = (tensor[:1].detach() for tensor in inputs())
    with dense_experts.without_copies(), Largest() as largest, torch.no_grad():
        experts(hidden, chosen, weights)
    assert largest.numel == experts.gate_up_proj[:2].numel()
