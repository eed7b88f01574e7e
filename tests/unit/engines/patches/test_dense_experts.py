import copy

import pytest
import torch

from torchacc.engines.patches import dense_experts

transformers = pytest.importorskip("transformers", minversion="5")
SIZE = {"hidden_size": 8, "intermediate_size": 6, "moe_intermediate_size": 6, "num_attention_heads": 2}
COUNTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4}
FAMILIES = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "gpt_oss": "GptOssExperts",
}
TOKENS = 5


def make(family):
    config = transformers.AutoConfig.for_model(family, **SIZE, **COUNTS)
    config._experts_implementation = "eager"
    module = getattr(transformers, family, None) or getattr(transformers.models, family)
    experts = getattr(getattr(module, f"modeling_{family}"), FAMILIES[family])(config)
    torch.manual_seed(3)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def compute_all(experts, hidden, chosen, weights):
    is_chosen, shares = dense_experts.shares(experts.num_experts, chosen, weights)
    return dense_experts.compute_all(experts, hidden, is_chosen, shares, lambda tensor: tensor)


def inputs():
    torch.manual_seed(5)
    hidden, weights = torch.randn(TOKENS, 8, requires_grad=True), torch.rand(TOKENS, 2, requires_grad=True)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])  # never the last
    return hidden, chosen, weights


@pytest.mark.parametrize("family", FAMILIES)
def test_the_outputs_and_gradients_are_those_of_transformers(family):
    experts = make(family)
    found = []
    for module, compute in ((experts, compute_all), (copy.deepcopy(experts), lambda module, *args: module(*args))):
        hidden, chosen, weights = inputs()
        output = compute(module, hidden, chosen, weights)
        output.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append({"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, **gradients})
    torch.testing.assert_close(*found)


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
