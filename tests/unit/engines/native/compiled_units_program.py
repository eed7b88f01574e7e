"""What `compute.compile` does on one device, for `test_compiled_units.py`; most cases without inductor.

python compiled_units_program.py out/
"""

import copy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from program_cases import cases_from, run_cases
from torch import nn

import torchacc
from tests.logged import heard
from torchacc.engines.native import recomputed_forward

FOLDER = Path(sys.argv[1])
"""Where cases write, and their outcomes go."""

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


class Layers(nn.Module):
    def __init__(self, layer, count=4):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer() for _ in range(count)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).tanh()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return x + self.inner(x)


class WithBuffer(Layer):
    """Counts its runs, and computes with the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs = self.runs + 1
        return super().forward(x) * (1 + self.runs / 10)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x).tanh(), 0.5, self.training)


class Breaking(Layer):
    def forward(self, x):
        if x.sum() > 1e6:  # ends the graph
            x = x / 2
        return super().forward(x)


def start(layer=Layer, *, model_class=Layers, count=4, **sections):
    """Return a compiled model and its plain copy, with nothing compiled before."""
    from torch._dynamo.utils import clear_compilation_metrics, counters, graph_break_reasons

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    graph_break_reasons.clear()
    torch.manual_seed(1)
    model = model_class(layer, count)
    plain = copy.deepcopy(model)
    compute = {"compile": True, "compile_backend": "aot_eager", **sections.pop("compute", {})}
    config = torchacc.Config.from_dict({"backend": "native", "compute": compute, **sections})
    return torchacc.accelerate(model, None, config), plain


def train(model, plain, steps=3, x=X):
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            each(x).backward()
            optimizer.step()
    for (name, one), (_, other) in zip(
        torchacc.full_state_dict(model).items(), plain.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def numbers_saved(model):
    """Return how many elements the forward of a model keeps for its backward, beside weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved = []

    def note(tensor):
        saved.append(0 if tensor.data_ptr() in weights else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(X).backward()
    return sum(saved)


def layers_that_are_alike_share_a_graph():
    model, plain = start()
    train(model, plain)
    report = torchacc.compile_report()
    assert (report.graphs, report.recompiles, report.breaks) == (1, (), ()), str(report)
    assert report.secs > 0


def inductor_trains_alike():
    model, plain = start(compute={"compile_backend": "inductor", "compile_cache": str(FOLDER / "programs")})
    train(model, plain)
    assert torchacc.compile_report().graphs == 1
    assert any((FOLDER / "programs").rglob("*.so"))


def broken_graph_is_named():
    model, plain = start(Breaking)
    train(model, plain)
    report = torchacc.compile_report()
    assert report.graphs > 1
    (place,) = report.breaks
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "ends the graph" in text)
    assert f"{Path(__file__).name}:{line}: " in place
    assert place in str(report)


def another_shape_is_named_and_warned_of():
    model, plain = start()
    with heard() as messages:
        train(model, plain)
        with torch.no_grad():
            model(X)  # an evaluation is no surprise
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in (4, 4, 4, 3):
            model(X[:rows]).backward()
            optimizer.step()
    assert "size mismatch at index 0. expected 4, actual 3" in torchacc.compile_report().recompiles[-1]
    (warned,) = [message for message in messages if "compiled anew" in message]
    assert "up to step 4 of SGD" in warned


def second_backward_of_a_graph():
    model, plain = start()
    for each in (model, plain):
        loss = each(X)
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def hooks_given_after_the_first_run_are_called():
    model, plain = start()
    seen = []

    def double(module, args, output):
        seen.append(module)
        return output * 2

    for each in (model, plain):
        each(X).backward()
        for layer in each.layers:
            layer.inner.linear.register_forward_hook(double)
    train(model, plain)
    assert len(seen) == 24


def recompute_inside_of_a_unit():
    model, plain = start(memory={"gc": True, "gc_cls": ["Inner"]})
    train(model, plain)
    report = torchacc.compile_report()
    assert (report.graphs, report.recompiles, report.breaks) == (1, (), ()), str(report)


def recompute_inside_of_a_graph():
    class Deeper(Layer):
        def __init__(self):
            super().__init__()
            self.last = Inner()

        def forward(self, x):
            return x + self.last(self.inner(x))

    kept, _ = start(Deeper)
    size = numbers_saved(kept)
    model, plain = start(Deeper, memory={"gc": True})
    with mock.patch.object(recomputed_forward, "checkpoint") as around:
        train(model, plain)
        assert numbers_saved(model) < size
    assert not around.called
    report = torchacc.compile_report()
    assert (report.graphs, report.recompiles, report.breaks) == (1, (), ()), str(report)


def recompute_around_a_broken_graph():
    for layer in (Breaking, WithBuffer):
        model, plain = start(layer, memory={"gc": True})
        with mock.patch.object(recomputed_forward, "checkpoint", wraps=recomputed_forward.checkpoint) as around:
            train(model, plain)
        assert around.called
        assert bool(torchacc.compile_report().breaks) is (layer is Breaking)


def recompute_where_classes_and_shapes_are_many():
    """More than torch.compile compiles of one function before it gives up."""

    def numbered(number):
        class Own(Layer):
            def forward(self, x):
                return super().forward(x) * (1 + number / 10)

        return Own

    class Numbered(Layer):
        count = 0

        def __init__(self):
            super().__init__()
            Numbered.count += 1
            self.number = Numbered.count

        def forward(self, x):
            return super().forward(x) / (self.number + 1)

    classes = iter([numbered(number) for number in range(4)])
    with torch._dynamo.config.patch(recompile_limit=3):
        train(*start(lambda: next(classes)(), memory={"gc": True}), steps=2)
        train(*start(Numbered, memory={"gc": True}), steps=2)


def keywords_of_layers_that_checkpoint_has_too():
    class Stopping(Layer):
        def forward(self, x, early_stop=0.0, scale=None):
            return super().forward(x) * (1 + early_stop) * scale

    class Passing(Layers):
        def forward(self, x):
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x, early_stop=2.0, scale=x.sigmoid())
            return self.head(x).square().mean()

    train(*start(Stopping, model_class=Passing, memory={"gc": True}))


def tensors_that_a_graph_writes_to_are_refused():
    class Writing(WithBuffer):
        def forward(self, x):
            self.runs.add_(1)
            return super().forward(x)

    class WritingCode(Layer):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(torch.ones(8), requires_grad=False)

        def forward(self, x):
            output = super().forward(x) * self.code[torch.arange(8)]
            with torch.no_grad():
                self.code.mul_(0.9)
            return output

    class WritingPlain(Layer):
        def __init__(self):
            super().__init__()
            self.inner.plain = torch.ones(())

        def forward(self, x):
            self.inner.plain.mul_(1.1)
            return super().forward(x) * self.inner.plain

    layers = ((Writing, "runs"), (WritingCode, "code"), (WritingPlain, "inner.plain"))
    each = ((layer, name, "aot_eager", memory) for layer, name in layers for memory in ({}, {"gc": True}))
    for layer, name, backend, memory in (*each, (Writing, "runs", "inductor", {})):
        model, _ = start(layer, compute={"compile_backend": backend}, memory=memory)
        with torch.no_grad():
            model(X)
        with pytest.raises(torchacc.EngineError, match=rf"{layer.__name__} writes to its tensor '{name}'.*Assign"):
            model(X)


def writes_that_no_gradient_follows_are_not_refused():
    class Spectral(Layer):
        def __init__(self):
            super().__init__()
            nn.utils.parametrizations.spectral_norm(self.inner.linear)

    train(*start(Spectral, memory={"gc": True}))

    class Frozen(WithBuffer):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

        def forward(self, x):
            self.runs.add_(1)
            return super().forward(x.detach())

    train(*start(Frozen))


def weights_that_change_before_a_graph_runs_again_are_refused():
    for layer, error in ((Layer, "modified by an inplace operation"), (Breaking, "has changed, or was frozen")):
        model, _ = start(layer, memory={"gc": True})
        loss = model(X)
        with torch.no_grad():
            model.layers[1].inner.linear.bias.mul_(2)
        with pytest.raises(RuntimeError, match=error):
            loss.backward()


def a_graph_that_runs_again_drops_the_same():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([WithDropout() for _ in range(2)])

        def forward(self, x):
            self.first = self.layers[0](x)
            return self.layers[1](self.first)

    start()  # which forgets what was compiled
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        model, compute = Dropping(), {"compile": True, "compile_backend": backend}
        config = torchacc.Config.from_dict({"backend": "native", "compute": compute, "memory": {"gc": True}})
        torchacc.accelerate(model, None, config)
        output = model(X)
        output.sum().backward()
        linear = model.layers[1].linear
        hidden = torch.tanh(linear(model.first))
        kept = (output - model.first).detach().ne(0).float() * 2
        assert 0.2 < kept.mean() / 2 < 0.8
        expected = torch.autograd.grad((hidden * kept).sum(), [linear.weight])[0]
        torch.testing.assert_close(linear.weight.grad, expected)


def layers_with_caches_share_a_graph():
    import transformers

    start()  # which forgets what was compiled
    sizes = {"num_hidden_layers": 5, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=16))
    compute = {"compile": True, "compile_backend": "aot_eager"}
    torchacc.accelerate(model, None, torchacc.Config.from_dict({"backend": "native", "compute": compute}))
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    report = torchacc.compile_report()
    assert (report.graphs, report.recompiles) == (2, ()), str(report)  # of the layers, and of the loss
    with torch._dynamo.config.patch(recompile_limit=3):  # fewer than layers
        assert model(input_ids=ids, labels=ids, use_cache=True).past_key_values is not None


def outputs_that_layers_note_run_eagerly():
    import transformers

    model, _ = start()
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=16, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    compute = {"compile": True, "compile_backend": "aot_eager", "bf16": True}  # with FSDP2's hooks
    torchacc.accelerate(model, None, torchacc.Config.from_dict({"backend": "native", "compute": compute}))
    ids = torch.arange(8)[None]
    model(input_ids=ids, output_attentions=True).attentions[-1].sum().backward()
    assert torchacc.compile_report().graphs == 0
    model(input_ids=ids, labels=ids).loss.backward()
    assert torchacc.compile_report().graphs > 0


if __name__ == "__main__":
    run_cases(cases_from(layers_that_are_alike_share_a_graph), FOLDER)
