"""A model's loss in chunks: the numbers of all logits at once, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchacc.chunked_loss.cross_entropy import LOGITS_OF_A_CHUNK
from torchacc.chunked_loss.lazy_logits import LazyLogits
from torchacc.chunked_loss.model_loss import ModelLoss, find_head
from torchacc.engines.device_losses import is_sum_over
from torchacc.errors import ConfigError

VOCABULARY = 11
TOKENS = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))


class Language(nn.Module):
    """A language model whose steps between head and loss are given."""

    def __init__(self, *, loss: Any = None, between: Any = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.loss, self.between = loss or mean_loss, between

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.between(self.head(self.embedding(ids).tanh()))
        return SimpleNamespace(loss=None if labels is None else self.loss(logits, labels), logits=logits)


def mean_loss(logits: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), **options)


def chunked(model: nn.Module, tokens: bool | int = 5, **options: Any) -> Any:
    """Return what runs a model with its loss in chunks."""
    loss, forward = ModelLoss(model, tokens, **options), model.forward
    return lambda *args, **kwargs: loss.run(forward, args, kwargs)


def results(model: nn.Module, run: Any, labels: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss = run(TOKENS, labels=labels).loss
    (loss * 3).backward()
    return [loss.detach(), *(p.grad if p.grad is None else p.grad.clone() for p in model.parameters())]


def check(model: nn.Module, labels: torch.Tensor = TOKENS, **options: Any) -> None:
    expected = results(model, model, labels)
    found = results(model, chunked(model, **options), labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def some_ignored() -> torch.Tensor:
    labels = TOKENS.clone()
    labels[0, 2:6] = -100
    return labels


@pytest.mark.parametrize("tokens", [1, 5, 12, 100, True])
@pytest.mark.parametrize("num_devices", [1, 2, 5])
def test_loss_and_gradients_are_those_of_all_logits(tokens, num_devices):
    check(Language(), some_ignored(), tokens=tokens, num_devices=num_devices)


@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 4}, {"ignore_index": -1}]
)
def test_options_of_cross_entropy(options):
    check(Language(loss=lambda logits, labels: mean_loss(logits, labels, **options)))


@pytest.mark.parametrize(
    "between",
    [
        lambda logits: 3 * torch.tanh(logits / 3),
        lambda logits: (logits * 0.5 - 1).clamp(-0.2, 2.0),
        lambda logits: -logits.float().contiguous().to(torch.float32),
        lambda logits: logits.transpose(0, 1).transpose(1, 0),
        lambda logits: logits.view(-1, VOCABULARY).view(2, -1, VOCABULARY),
        lambda logits: logits.view(2, 7, -1)[..., :],
        lambda logits: logits.mul(torch.tensor(0.7)).add(1.0),
        lambda logits: torch.tensor(2.0) * logits,
        lambda logits: logits[:, :, :, ...],
    ],
)
def test_what_is_done_to_logits(between):
    check(Language(between=between))


def test_a_bias_outside_of_the_head_is_trained():
    model = Language()
    model.between = lambda logits: logits + model.bias
    check(model)
    assert model.bias.grad is not None


@pytest.mark.parametrize(
    "between",
    [
        lambda model, logits: logits * model.head.weight.sum(),
        lambda model, logits: logits + 2 * model.head.bias,
        lambda model, logits: (logits + model.scale) * (model.scale * 2),
        lambda model, logits: torch.sub(logits, model.scale, alpha=3),
        lambda model, logits: torch.clamp(logits, max=model.scale),
    ],
)
def test_what_is_made_of_parameters_trains_them(between):
    model = Language()
    model.scale = nn.Parameter(torch.tensor(0.5))
    model.between = lambda logits: between(model, logits)
    check(model)


def test_a_head_whose_weight_is_computed():
    for parametrize in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal):
        model = Language()
        parametrize(model.head)
        check(model)


@pytest.mark.parametrize("hook", [lambda grad: grad * 2, lambda grad: grad.clamp(-0.05, 0.05)])
def test_hooks_on_a_parameter_of_the_head_see_its_gradient_once(hook):
    model = Language()
    model.head.weight.register_hook(hook)
    check(model)


def test_hooks_of_the_heads_forward():
    model = Language()
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.head.register_forward_hook(lambda module, args, output: output * 3)
    check(model)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_the_head_are_refused(register):
    model = Language()
    hook = getattr(model.head, register)(lambda *_: None)
    run = chunked(model)
    with pytest.raises(ConfigError, match="the head 'head' has a backward hook, which would never be called"):
        run(TOKENS, labels=TOKENS)
    with torch.no_grad():
        run(TOKENS, labels=TOKENS)
    hook.remove()
    check(Language())


def test_float16_is_refused_where_there_are_gradients():
    model = Language()
    run = chunked(model)
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(ConfigError, match="its gradients are computed before a scaler has scaled the loss"):
            run(TOKENS, labels=TOKENS)
        with torch.no_grad():
            run(TOKENS, labels=TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        run(TOKENS, labels=TOKENS).loss.backward()


def test_float64_keeps_its_digits():
    model = Language().double()
    expected, found = results(model, model, TOKENS), results(model, chunked(model), TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Tempered(nn.Linear):
    """Takes another argument than hidden states."""

    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return super().forward(x) / temperature


def test_arguments_of_the_head_are_refused():
    model = Language()
    model.head = Tempered(4, VOCABULARY)
    with torch.no_grad():
        logits = model.head(model.embedding(TOKENS).tanh(), temperature=2.0)
    run = chunked(model)
    model.embedding.register_forward_hook(lambda module, args, output: model.head(output, temperature=2.0) and output)
    with pytest.raises(ConfigError, match="uses arguments of the head beside the hidden states"):
        run(TOKENS, labels=TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(model.head(model.embedding.weight[TOKENS].tanh(), temperature=2.0), logits)


class Borrowing(nn.Linear):
    """Computes with a weight that is trained and that it does not have."""

    lent: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.lent[0].weight.mean()


def test_a_head_that_trains_what_is_not_its_own_is_refused():
    model = Language()
    model.head = Borrowing(4, VOCABULARY)
    model.head.lent = [model.embedding]
    with pytest.raises(
        ConfigError, match=r"with a tensor of shape \(11, 4\) that is trained and is not a parameter of"
    ):
        chunked(model)(TOKENS, labels=TOKENS)


def test_several_losses_of_one_head():
    def two(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(logits, labels) + 0.3 * mean_loss(logits * 2, labels.flip(1))

    check(Language(loss=two))


def test_no_label_counts():
    model, labels = Language(), torch.full_like(TOKENS, -100)
    expected, found = results(model, model, labels), results(model, chunked(model), labels)
    assert found[0].isnan()
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("trained", ["embedding.weight", "head.weight", "head.bias"])
def test_frozen_parameters_get_no_gradients(trained):
    model = Language()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name == trained
    check(model)


def test_backward_twice_through_a_kept_graph():
    model = Language()
    run = chunked(model)
    loss = run(TOKENS, labels=TOKENS).loss
    loss.backward(retain_graph=True)
    once = model.head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.head.weight.grad, 2 * once)


def test_logits_are_never_there_as_a_whole():
    sizes = []
    model = Language()
    project = model.head.forward
    model.head.forward = lambda hidden: sizes.append(len(hidden)) or project(hidden)
    chunked(model)(TOKENS, labels=TOKENS).loss.backward()
    assert sizes == [4, 4, 4]  # 12 tokens in chunks of at most 5, as alike as can be
    sizes.clear()
    with torch.no_grad():
        chunked(model, True)(TOKENS, labels=TOKENS)
    assert sizes == [12]
    assert LOGITS_OF_A_CHUNK > 12 * VOCABULARY


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_over_samples_is_found(reduction):
    model = Language(loss=lambda logits, labels: mean_loss(logits, labels, reduction=reduction))
    assert is_sum_over(2, chunked(model)(TOKENS, labels=TOKENS).loss) == (reduction == "sum")


def test_logits_without_labels():
    model = Language()
    expected, run = model(TOKENS).logits, chunked(model)
    with torch.no_grad():
        torch.testing.assert_close(run(TOKENS).logits, expected)
    model.eval()
    torch.testing.assert_close(run(TOKENS).logits, expected)
    model.train()
    with pytest.raises(ConfigError, match="was called in training without labels"):
        run(TOKENS)
    run(TOKENS, TOKENS).loss.backward()  # labels by their place


def test_logits_after_a_forward_with_labels():
    logits = chunked(Language())(TOKENS, labels=TOKENS).logits
    assert isinstance(logits, LazyLogits)
    assert logits.shape == (2, 7, VOCABULARY)
    assert logits.hidden.is_meta
    for use in (lambda: logits.argmax(-1), lambda: logits.detach(), lambda: torch.softmax(logits, -1)):
        with pytest.raises(ConfigError, match="which were never there as a whole"):
            use()
    with pytest.raises(ConfigError, match="after its forward"):
        mean_loss(logits, TOKENS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: F.nll_loss(torch.log_softmax(logits, -1)[:, 0], labels[:, 0]),
        lambda logits, labels: mean_loss(logits[..., :5], labels),
        lambda logits, labels: mean_loss(logits[:, :, 1:], labels),
        lambda logits, labels: mean_loss(logits[0, 0, 0], labels),
        lambda logits, labels: mean_loss(logits[:, :, :5, ...], labels),
        lambda logits, labels: mean_loss(logits.mul_(2), labels),
        lambda logits, labels: mean_loss(torch.tanh_(logits), labels),
        lambda logits, labels: mean_loss(logits.view(-1, 7), labels),
        lambda logits, labels: mean_loss(logits.view(VOCABULARY, -1), labels),
        lambda logits, labels: mean_loss(logits.flatten(1), labels),
        lambda logits, labels: mean_loss(logits + torch.zeros(2, 7, 1), labels),
        lambda logits, labels: mean_loss(logits + logits, labels),
        lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
        lambda logits, labels: F.cross_entropy(logits, labels),
        lambda logits, labels: mean_loss(logits, labels, weight=torch.ones(VOCABULARY)),
        lambda logits, labels: mean_loss(logits, labels, reduction="none").mean(),
        lambda logits, labels: logits.logsumexp(-1).mean(),
        lambda logits, labels: torch.cat([logits, logits]).mean(),
    ],
)
def test_other_losses_of_the_logits_are_refused(loss):
    with pytest.raises(ConfigError, match="config.compute.chunked_loss = False"):
        chunked(Language(loss=loss))(TOKENS, labels=TOKENS)


def test_a_loss_of_something_else_is_refused():
    model = Language()
    model.loss = lambda logits, labels: model.bias.sum()
    with pytest.raises(ConfigError, match="computes no cross entropy of what its head 'head' returns"):
        chunked(model)(TOKENS, labels=TOKENS)


def test_a_model_without_a_head():
    with pytest.raises(ConfigError, match="has no module that computes logits"):
        find_head(nn.Linear(2, 2))
    model = Language()
    model.head = nn.Sequential(nn.Linear(4, VOCABULARY))
    with pytest.raises(ConfigError, match="the logits of Language, is a Sequential, which is not a linear layer"):
        find_head(model)


def test_bfloat16_sums_gradients_in_float32():
    model = Language().bfloat16()
    wide = Language()
    wide.load_state_dict(model.state_dict())
    found, expected = results(model, chunked(model, 1), TOKENS), results(wide, wide, TOKENS)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[2], expected[2].bfloat16(), rtol=0.03, atol=0.01)
