"""The memory plan's arithmetic, on models that are small enough to count by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchacc.config import Config
from torchacc.engines.optimizers import find_optimizer
from torchacc.errors import ConfigError
from torchacc.memory_plan import count_states, study
from torchacc.memory_plan.order import in_xla_order
from torchacc.memory_plan.trace import record

WIDTH = 64
ROWS = 32
TOKENS = 4096
MANY = 4096
"""So many that activations are what counts."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(x, labels)}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class Gated(nn.Module):
    def __init__(self, scale_last: bool) -> None:
        super().__init__()
        if not scale_last:
            self.scale = Scale()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        if scale_last:
            self.scale = Scale()

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.scale(x))))


class GatedNet(Net):
    _no_split_modules = ("Gated",)

    def __init__(self, layers: int = 3, scale_last: bool = False) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Gated(scale_last) for _ in range(layers))


class Asking(Net):
    def forward(self, x, labels):
        return super().forward(x if x.sum().item() > 0 else -x, labels)


class Silent(Net):
    def forward(self, x, labels):
        return {"x": x}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x, labels):
        logits = F.linear(self.embedding(x), self.embedding.weight)
        return {"loss": F.cross_entropy(logits, labels)}


def plan(kind=Net, config=None, num_states=2, backend="xla", rows=ROWS, **options):
    with torch.device("meta"):
        model = kind(**options).train()
        batch = {"x": torch.zeros(rows, WIDTH), "labels": torch.zeros(rows, WIDTH)}
    return study(model, batch, config or Config(), num_states=num_states, backend=backend)


PARAMETER_BYTES = 3 * 2 * 4 * WIDTH * WIDTH * 4
HIDDEN_BYTES = MANY * WIDTH * 4


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_parameters_and_state_are_split_evenly(strategy, num_devices):
    needed = plan().on(num_devices, strategy)
    assert needed.parameters == PARAMETER_BYTES / num_devices
    assert needed.optimizer == 2 * PARAMETER_BYTES / num_devices


def test_replicas_hold_them_whole_and_hybrid_in_groups():
    step = plan()
    assert step.on(8, "NO_SHARD").parameters == PARAMETER_BYTES
    assert step.on(8, "HYBRID_SHARD", replicas=2).parameters == PARAMETER_BYTES / 4


def test_what_does_not_divide_stays_whole():
    assert plan().on(3, "FULL_SHARD").parameters == PARAMETER_BYTES


def test_strategies_need_less_the_more_they_shard():
    step = plan(rows=1)
    full, kept, whole = (step.on(4, name).total for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    assert full < kept < whole
    assert step.on(4, "SHARD_GRAD_OP").gathered > step.on(4, "FULL_SHARD").gathered


def test_activations_are_what_backward_needs_of_each_layer():
    """A layer keeps what `up` reads, and what `tanh` makes, which `down` reads as well."""
    three, four = (plan(layers=layers, rows=MANY).on(1, "NO_SHARD").activations for layers in (3, 4))
    assert four - three == (1 + 4) * HIDDEN_BYTES


def test_of_silu_the_sigmoid_is_kept_too():
    """A layer keeps what goes into it and into `up`; what `up` makes, its sigmoid and their product."""
    three, four = (plan(GatedNet, layers=layers, rows=MANY).on(1, "NO_SHARD").activations for layers in (3, 4))
    assert four - three == (2 + 3 * 4) * HIDDEN_BYTES


@pytest.mark.parametrize("recomputed", [(), ("layers.0", "layers.1")])
def test_gradients_come_from_the_last_parameter_to_the_first(recomputed):
    """So those of products wait for that of a scale that is used before them, where it stands behind them."""
    for scale_last, expected in ((True, ["scale", "down", "up"]), (False, ["down", "up", "scale"])):
        with torch.device("meta"):
            model = GatedNet(layers=2, scale_last=scale_last).train()
            batch = {"x": torch.zeros(ROWS, WIDTH), "labels": torch.zeros(ROWS, WIDTH)}
        trace = in_xla_order(record(model, batch, recomputed=recomputed))
        names = {value: name for name, value in trace.gradients.items()}
        made = [names[value] for operation in trace.operations for value in operation.makes if value in names]
        parts = [name.removesuffix(".weight").split(".")[1:] for name in made]
        assert parts == [[layer, name] for layer in "10" for name in expected]


def test_run_eagerly_a_layer_keeps_as_much():
    steps = [plan(layers=layers, backend="native", num_states=0, rows=MANY) for layers in (3, 4)]
    three, four = (step.on(1, "NO_SHARD").activations for step in steps)
    assert four - three == 5 * HIDDEN_BYTES


def test_recompute_keeps_only_what_goes_into_a_layer():
    config = Config()
    config.memory.gc = True
    steps = [plan(layers=layers, config=config, rows=MANY) for layers in (6, 7)]
    six, seven = (step.on(1, "NO_SHARD").activations for step in steps)
    assert seven - six == HIDDEN_BYTES


def test_products_in_bfloat16_keep_half():
    config = Config()
    config.compute.bf16 = True
    for backend in ("xla", "native"):
        half, whole = (plan(config=each, backend=backend, rows=MANY) for each in (config, Config()))
        assert half.on(1, "NO_SHARD").activations < 0.8 * whole.on(1, "NO_SHARD").activations
        assert half.on(1, "NO_SHARD").parameters == PARAMETER_BYTES


def test_the_cast_of_a_weight_is_there_once():
    """Of its shard, from forward to backward, beside the weight that is gathered for the moment."""
    config = Config()
    config.compute.bf16 = True
    shards = PARAMETER_BYTES / 2 / 2
    step = plan(config=config, rows=1)
    assert step.on(1, "NO_SHARD").gathered >= 2 * shards
    assert shards < step.on(2, "FULL_SHARD").gathered < 2 * shards


def test_the_native_engine_holds_gradients_until_the_step():
    step = plan(backend="native", rows=1)
    assert step.on(4, "FULL_SHARD").gradients >= PARAMETER_BYTES / 4
    assert step.on(1, "NO_SHARD").total >= 4 * PARAMETER_BYTES


def test_natively_weights_are_whole_a_unit_at_a_time():
    """Where activations are the most, in the last layer's backward: that one and the one before, or all of them."""
    layer = PARAMETER_BYTES / 3
    step = plan(backend="native", rows=MANY)
    assert step.on(2, "FULL_SHARD").gathered == 2 * layer
    assert step.on(2, "SHARD_GRAD_OP").gathered == PARAMETER_BYTES
    assert step.on(2, "NO_SHARD").gathered == step.on(1, "NO_SHARD").gathered == 0  # the model is left as it is
    assert step.on(2, "FULL_SHARD").gradients == layer / 2  # that of `down`, whole


def test_the_gradient_of_a_lookup_joins_that_of_the_head():
    with torch.device("meta"):
        tokens = torch.zeros(8, dtype=torch.long)
        step = study(Tied(), {"x": tokens, "labels": tokens}, Config(), num_states=0)
    weight = TOKENS * WIDTH * 4
    one, replicas, sharded = step.on(1, "NO_SHARD"), step.on(4, "NO_SHARD"), step.on(4, "FULL_SHARD")
    logits = 8 * TOKENS * 4
    assert weight < one.activations < weight + 4 * logits
    assert replicas.activations + replicas.gradients == one.activations + 2 * weight  # the lookup's, and their sum
    assert sharded.activations == one.activations + weight / 4


class WithEmptyEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.head = nn.Embedding(0, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, tokens):
        return self.head(self.none(tokens)).sum()


def test_an_embedding_without_rows_takes_nothing():
    with torch.device("meta"):
        step = study(WithEmptyEmbedding(), {"tokens": torch.zeros(0, dtype=torch.long)}, Config(), num_states=0)
    assert step.on(2, "FULL_SHARD").total < 8 * WIDTH * 4


@pytest.mark.parametrize(
    ("name", "options", "expected"), [("adamw", {}, 2), ("SGD", {}, 0), ("sgd", {"momentum": 0.9}, 1)]
)
def test_an_optimizer_tells_what_it_keeps(name, options, expected):
    assert count_states(find_optimizer(name), {"lr": 1e-3, **options}) == expected
    assert plan(num_states=expected).on(2, "FULL_SHARD").optimizer == expected * PARAMETER_BYTES / 2


def test_the_fewest_devices_are_found():
    step = plan(layers=8, rows=1)
    memory = step.on(32, "FULL_SHARD").total
    assert step.smallest(memory, "FULL_SHARD") == 32
    assert step.smallest(step.on(1, "FULL_SHARD").total, "FULL_SHARD") == 1
    assert step.smallest(step.on(8, "HYBRID_SHARD", replicas=2).total, "HYBRID_SHARD", replicas=2) == 8
    assert step.smallest(step.on(1, "NO_SHARD").parameters, "NO_SHARD") is None
    assert step.smallest(step.on(24, "HYBRID_SHARD", replicas=3).total, "HYBRID_SHARD", replicas=3) == 24


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match=r"Asking cannot be planned, .* the meta device"):
        plan(Asking)
    with pytest.raises(ConfigError, match="Silent returns no loss"):
        plan(Silent)
    offloaded = Config()
    offloaded.dist.fsdp.cpu_offload = True
    with pytest.raises(ConfigError, match=r"config.dist.fsdp.cpu_offload = True is not in the memory plan"):
        plan(config=offloaded)
    split = Config()
    split.dist.tp.size = 2
    with pytest.raises(ConfigError, match=r"config.dist.tp.size = 2 is in the memory plan of the native engine only"):
        plan(config=split)


def test_devices_that_a_strategy_cannot_have_are_refused():
    with pytest.raises(ConfigError, match="HYBRID_SHARD"):
        plan().on(2, "HYBRID_SHARD", replicas=2)
    with pytest.raises(ConfigError, match="8 devices cannot hold 3 replicas"):
        plan().on(8, "FULL_SHARD", replicas=3)


def test_optimizers_that_cannot_be_planned_are_refused():
    with pytest.raises(ConfigError, match=r"'adamww': torch.optim has no such optimizer; .*'AdamW'"):
        find_optimizer("adamww")
    with pytest.raises(ConfigError, match="LBFGS cannot be planned"):
        count_states(find_optimizer("lbfgs"), {"lr": 1.0})
    with pytest.raises(ConfigError, match="AdamW cannot be planned: .*momentum"):
        count_states(find_optimizer("adamw"), {"momentum": 0.9})


class Language(nn.Module):
    VOCABULARY = 4096

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, self.VOCABULARY, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.head(x).float(), labels)}


@pytest.mark.parametrize("bf16", [False, True])
def test_chunked_loss_has_logits_of_a_chunk(bf16):
    config, totals = Config(), []
    config.compute.bf16 = bf16
    for tokens in (False, TOKENS, 64):
        config.compute.chunked_loss = tokens
        with torch.device("meta"):
            model = Language()
            batch = {"x": torch.empty(TOKENS, WIDTH), "labels": torch.empty(TOKENS, dtype=torch.long)}
        step = study(model, batch, config, num_states=0, backend="native")
        totals.append(step.on(1, "FULL_SHARD").total)
        assert "forward" not in vars(model.head)
    without, in_one, in_chunks = totals
    logits = 4 * TOKENS * Language.VOCABULARY
    assert without >= 1.4 * logits
    assert in_one >= 0.9 * logits  # all of them at once are as they are
    assert in_chunks < 0.2 * logits


def test_products_that_are_kept_take_what_lies_between():
    def total(**memory):
        config = Config(memory=memory)
        return plan(GatedNet, config, backend="native", rows=MANY, layers=4).on(1, "FULL_SHARD").total

    assert total(gc=True) < total(gc=True, gc_policy="save_matmuls") < total()


def test_products_that_are_kept_are_not_planned_under_xla():
    config = Config(memory={"gc": True, "gc_policy": "save_matmuls"})
    with pytest.raises(ConfigError, match="in the memory plan of the native engine only"):
        study(Language(), {}, config, num_states=0)


def test_chunked_loss_is_not_planned_in_stages():
    config = Config(compute={"chunked_loss": True}, dist={"pp": {"size": 2}})
    with pytest.raises(ConfigError, match="beside config.dist.pp.size is not in the memory plan"):
        study(Language(), {}, config, num_states=0, backend="native")


def test_chunked_loss_is_not_planned_under_xla():
    config = Config(compute={"chunked_loss": True})
    with pytest.raises(ConfigError, match="in the memory plan of the native engine only"):
        study(Language(), {}, config, num_states=0)
