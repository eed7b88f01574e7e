"""What `compute.compile` does on one device, for `test_compiled_units.py`; most cases without inductor.

python compiled_units_program.py out/
"""

import copy
import sys
from pathlib import Path

import torch
from program_cases import cases_from, run_cases
from torch import nn

import torchacc
from tests.logged import heard

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


class Breaking(Layer):
    def forward(self, x):
        if x.sum() > 1e6:  # ends the graph
            x = x / 2
        return super().forward(x)


def start(layer=Layer, **sections):
    """Return a compiled model and its plain copy, with nothing compiled before."""
    from torch._dynamo.utils import clear_compilation_metrics, counters, graph_break_reasons

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    graph_break_reasons.clear()
    torch.manual_seed(1)
    model = Layers(layer)
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
    assert any((FOLDER / "programs").rglob("*.cpp")) or any((FOLDER / "programs").iterdir())


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
