"""What the memory plan says of a device that computes a part of layers, samples, experts or stages."""

from functools import partial

import pytest
import torch

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.memory_plan import study
from torchacc.parallel.axes import Role

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 256, "max_position_embeddings": 256, "use_cache": False}


def llama():
    config = transformers.LlamaConfig(**SIZES, intermediate_size=256)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def mixtral(num_experts=4):
    config = transformers.MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=num_experts)
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config).train()


def plan(
    make=llama,
    rows=4,
    backend="native",
    num_microbatches=None,
    schedule="gpipe",
    adds_gradients=False,
    bf16=False,
    **axes,
):
    config = Config(backend="native")
    config.compute.bf16 = bf16
    for axis, size in axes.items():
        getattr(config.dist, axis).size = size
    config.dist.pp.num_microbatches, config.dist.pp.schedule = num_microbatches, schedule
    tokens = torch.zeros(rows, 256, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    return study(make(), batch, config, num_states=2, backend=backend, adds_gradients=adds_gradients)


def test_gradients_of_batches_before_are_unsharded():
    one, several = plan(), plan(adds_gradients=True)
    nbytes = 4 * one.plan.numel
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        more = several.on(4, strategy).total - one.on(4, strategy).total
        assert 0.5 * nbytes < more < 1.1 * nbytes, strategy
    with pytest.raises(ConfigError, match=r"training\.gradient_accumulation_steps .* native engine only"):
        plan(adds_gradients=True, backend="xla")


def test_devices_that_share_samples_have_a_part_of_the_activations_and_of_the_parameters():
    whole, part = plan().on(1, "FULL_SHARD"), plan(sp=4).on(4, "FULL_SHARD")
    assert part.activations < 0.3 * whole.activations
    assert part.parameters == pytest.approx(whole.parameters / 4, rel=0.01)


def test_devices_that_share_layers_have_parts_of_them():
    whole, two, four = (plan(tp=size).on(size, "FULL_SHARD") for size in (1, 2, 4))
    assert two.parameters == pytest.approx(whole.parameters / 2, rel=0.01)
    # The two key-value heads are copied to each of four devices.
    heads = 4 * 2 * 64 * 32 * 4
    assert four.parameters == pytest.approx((whole.parameters - heads) / 4 + heads, rel=0.02)
    assert two.activations < 0.8 * whole.activations
    assert plan(tp=2).on(4, "FULL_SHARD").parameters == pytest.approx(two.parameters / 2, rel=0.01)


def test_a_stage_has_its_layers_and_the_activations_of_all_microbatches():
    whole, stage = plan().on(1, "FULL_SHARD"), plan(pp=4).on(4, "FULL_SHARD")
    assert stage.parameters < 0.35 * whole.parameters
    few, many = (plan(pp=2, rows=8, num_microbatches=count).on(2, "FULL_SHARD").activations for count in (2, 8))
    assert many > 0.7 * few  # all wait for backward, however small they are
    twice = plan(pp=2, rows=16, num_microbatches=8).on(2, "FULL_SHARD").activations
    assert twice > 1.8 * many
    one_by_one = plan(pp=2, rows=16, num_microbatches=8, schedule="1f1b").on(2, "FULL_SHARD").activations
    assert one_by_one < 0.4 * twice  # of the first stage two wait


def test_a_device_with_several_stages_has_the_parameters_of_all_and_a_few_more_activations():
    own = partial(plan, pp=2, rows=16, num_microbatches=8)
    one, two = own(schedule="1f1b"), own(schedule="interleaved")
    assert [[stage.lifetimes.stage for stage in device.stages] for device in two.devices] == [[0, 2], [1, 3]]
    one, two, all_forwards = (each.on(2, "FULL_SHARD") for each in (one, two, own()))
    assert two.parameters == one.parameters
    assert one.activations < two.activations < 0.7 * all_forwards.activations


def test_layers_in_a_loop_are_refused_under_xla_alone():
    config = Config()
    config.compute.scan_layers = True
    tokens = torch.zeros(1, 16, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    look = partial(study, batch=batch, config=config, num_states=2)
    assert look(llama(), backend="native").on(1, "FULL_SHARD") == plan_of(batch)
    with pytest.raises(ConfigError, match=r"compute\.scan_layers = True is not in the memory plan"):
        look(llama())


def plan_of(batch):
    return study(llama(), batch, Config(), num_states=2, backend="native").on(1, "FULL_SHARD")


def test_a_device_gathers_its_own_experts_only():
    all_of_them, half = (plan(mixtral, ep=size).on(4, "SHARD_GRAD_OP") for size in (1, 2))
    experts = 4 * 4 * 3 * 64 * 128 * 4
    assert half.parameters == all_of_them.parameters
    assert all_of_them.gathered - half.gathered == experts / 2


def test_a_device_computes_with_shards_that_are_full_weights():
    all_of_them, half = (plan(mixtral, ep=size).on(2, "SHARD_GRAD_OP") for size in (1, 2))
    assert all_of_them.gathered - half.gathered == 4 * 4 * 3 * 64 * 128 * 4  # of experts none are gathered
    assert plan(llama, tp=2).on(2, "FULL_SHARD").gathered == 0
    assert plan(llama, tp=2, bf16=True).on(2, "FULL_SHARD").gathered > 0


def test_devices_that_share_layers_have_other_experts_each():
    spread, both = plan(mixtral, ep=4), plan(mixtral, ep=2, tp=2)
    others, halves = (step.on(4, "SHARD_GRAD_OP").gathered for step in (spread, both))
    assert halves == pytest.approx(others / 2, rel=0.05)
    to_experts = [
        sum(each.nbytes for each in step.devices[0].stages[0].sent if each.role is Role.EXPERT)
        for step in (spread, both)
    ]
    assert to_experts[1] == to_experts[0] / 2  # each sends half of the same tokens


def test_experts_that_do_not_divide_are_refused_by_the_step():
    assert plan(mixtral, ep=2).plan_on(4, "FULL_SHARD").experts[0].held == ((0, 2), (1, 3))
    step = plan(partial(mixtral, 6), ep=2)
    with pytest.raises(ConfigError, match="the 6 experts"):
        step.plan_on(4, "FULL_SHARD")
    needed = step.on(6, "FULL_SHARD").total
    assert step.on(2, "FULL_SHARD").total > needed
    assert step.smallest(needed, "FULL_SHARD") == 6


def test_what_the_engine_refuses_is_not_planned():
    with pytest.raises(ConfigError, match="has no module of experts"):
        plan(ep=2)
    with pytest.raises(ConfigError, match="in the memory plan of the native engine only"):
        plan(sp=2, backend="xla")
    with pytest.raises(ConfigError, match="'zero_bubble' is not in the memory plan"):
        plan(pp=2, schedule="zero_bubble")
    with pytest.raises(ConfigError, match=r"3 devices cannot hold 1 replicas, each of a multiple of 2 devices"):
        plan(sp=2).on(3, "FULL_SHARD")


def test_keys_that_groups_of_devices_gather_are_refused():
    def make(**options):
        config = transformers.AutoConfig.for_model("mistral", **SIZES, intermediate_size=256, **options)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config).train()

    plan(partial(make, sliding_window=300), sp=8)
    for options in ({"sliding_window": 100}, {"sliding_window": None, "attention_dropout": 0.1}):
        with pytest.raises(ConfigError, match="sp.size = 8 computes attention in .* groups .* gather keys and values"):
            plan(partial(make, **options), sp=8)


def test_the_model_stays_as_it_is():
    model = mixtral()
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    config = Config(backend="native")
    config.dist.ep.size = 2
    tokens = torch.zeros(1, 32, dtype=torch.long, device="meta")
    study(model, {"input_ids": tokens, "labels": tokens}, config, num_states=2, backend="native")
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before
    assert "forward" not in vars(model.model.layers[0].mlp.experts)
