"""What `compute.fp8` does, emulated on a CPU, beside torchao by hand; for `test_float8_training.py`.

python float8_program.py out/ case ...     on one rank, or under torchrun
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from program_cases import run_cases
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

import torchacc
from torchacc.engines.native.activation_offload import _is_weight

RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCAB, LENGTH, STEPS = 96, 16, 3
RECIPES = ("tensorwise", "rowwise")
IDS = torch.randint(0, VOCAB, (2 * NUM_RANKS, LENGTH), generator=torch.Generator().manual_seed(1))
OWN = IDS[2 * RANK : 2 * RANK + 2]


def llama(**changed):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=False, **changed))


def gpt2():
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": LENGTH}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off, tie_word_embeddings=False))


def accelerated(model, *, compute=None, strategy="FULL_SHARD", optimizer=None, **sections):
    compute = {"bf16": True, "fp8": True, "fp8_min_features": 16, "fp8_emulate": True, **(compute or {})}
    fsdp = {"size": NUM_RANKS, "sharding_strategy": strategy, **sections.pop("fsdp", {})}
    config = {"backend": "native", "compute": compute, "dist": {"fsdp": fsdp}, **sections}
    return torchacc.accelerate(model, None, torchacc.Config.from_dict(config), optimizer=optimizer)


def by_hand(model, recipe, is_float8):
    """Return a model as torchao's page has it: converted, and sharded by `fully_shard`."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=True, enable_fsdp_float8_all_gather=recipe == "tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: is_float8(name))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for module in (*layers, model):
        fully_shard(module, mp_policy=policy)
    return model


def loss_by_hand(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def full(tensor):
    """Return a DTensor's full tensor, also where it lies in torchao's subclass."""
    local = getattr(tensor._local_tensor, "_tensor", tensor._local_tensor).detach().contiguous()
    if NUM_RANKS == 1:
        return local
    found = local.new_empty(NUM_RANKS * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(found, local)
    return found


def mean(loss):
    total = loss.detach().clone()
    if NUM_RANKS > 1:
        dist.all_reduce(total)
    return total / NUM_RANKS


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}: {(found[name] - tensor).abs().max()}"


def train(model, optimizer, steps=STEPS):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=OWN, labels=OWN).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradients_of(model):
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def weights_of(model):
    return torchacc.full_state_dict(model, rank0_only=False)


def compare_with_torchao(make_model, recipe, is_float8, **options):
    """Train both, and compare losses, gradients and parameters to the last digit."""
    model = accelerated(make_model(), compute={"fp8_recipe": recipe, **options.pop("compute", {})}, **options)
    hand = by_hand(make_model(), recipe, is_float8)
    optimizer, other = adamw(model), adamw(hand)
    for step in range(STEPS):
        optimizer.zero_grad()
        other.zero_grad()
        loss, expected = model(input_ids=OWN, labels=OWN).loss, loss_by_hand(hand, OWN)
        loss.backward()
        expected.backward()
        assert loss.item() == mean(expected).item(), step
        check_equal(gradients_of(model), gradients_of(hand))
        optimizer.step()
        other.step()
        if recipe == "tensorwise":
            precompute_float8_dynamic_scale_for_fsdp(hand)
    check_equal(weights_of(model), {name: full(parameter) for name, parameter in hand.named_parameters()})


def llama_is_torchaos(recipe):
    compare_with_torchao(llama, recipe, lambda name: name != "lm_head")


def head_of_gpt2_is_torchaos(recipe):
    compare_with_torchao(gpt2, recipe, lambda name: name == "lm_head", compute={"fp8_layers": ["lm_head"]})


def weights_kept_for_backward_are_the_same():
    compare_with_torchao(llama, "tensorwise", lambda name: name != "lm_head", strategy="SHARD_GRAD_OP")


def what_a_script_writes_changes_scales():
    model, hand = accelerated(llama()), by_hand(llama(), "tensorwise", lambda name: name != "lm_head")
    model(input_ids=OWN, labels=OWN).loss.backward()
    for each in (model, hand):
        weight = each.model.layers[0].mlp.up_proj.weight
        with torch.no_grad():
            getattr(weight._local_tensor, "_tensor", weight._local_tensor).mul_(3)
    assert model(input_ids=OWN, labels=OWN).loss.item() == mean(loss_by_hand(hand, OWN)).item()


def layers_stay_what_they_are():
    model = llama()
    layer, seen = model.model.layers[0].mlp.up_proj, []
    # What autograd saves of the unsharded weight is known as a weight, so that activation offload leaves it.
    layer.register_forward_hook(lambda module, *args: seen.append(_is_weight(module.weight.t())))
    names = list(model.state_dict())
    accelerated(model)
    assert model.model.layers[0].mlp.up_proj is layer
    model(input_ids=OWN)
    assert seen == [True]
    assert list(model.state_dict()) == names
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert type(layer.weight._local_tensor) is torch.Tensor
    assert not vars(layer.weight._local_tensor)


def checkpoint_goes_on_where_it_was(folder):
    from torchacc import checkpoint

    model = accelerated(llama())
    optimizer = adamw(model)
    train(model, optimizer)
    checkpoint.save(str(folder / f"run{NUM_RANKS}"), model=model, optimizer=optimizer)
    expected = train(model, optimizer)
    again = accelerated(llama())
    other = adamw(again)
    checkpoint.load(str(folder / f"run{NUM_RANKS}"), model=again, optimizer=other)
    assert train(again, other) == expected
    check_equal(weights_of(again), weights_of(model))
    without = accelerated(llama(), compute={"fp8": False, "fp8_min_features": None, "fp8_emulate": False})
    checkpoint.load(str(folder / f"run{NUM_RANKS}"), model=without)
    checkpoint.save(str(folder / f"without{NUM_RANKS}"), model=without)
    checkpoint.load(str(folder / f"without{NUM_RANKS}"), model=again)
    check_equal(weights_of(again), weights_of(without))
    checkpoint.save(str(folder / f"hf{NUM_RANKS}"), model=model)
    read = transformers.LlamaForCausalLM.from_pretrained(folder / f"hf{NUM_RANKS}", dtype=torch.float32)
    check_equal(read.state_dict(), weights_of(model))


def trained(steps=STEPS, make_model=llama, **options):
    model = accelerated(make_model(), **options)
    return train(model, adamw(model), steps), weights_of(model)


def recompute_changes_nothing():
    losses, weights = trained()
    again, others = trained(memory={"gc": True})
    assert again == losses
    check_equal(others, weights)


def compiled_layers_train_alike():
    losses, _ = trained()
    before = torchacc.compile_report()  # of neither backend: both would end a graph at the same place
    same, _ = trained(compute={"compile": True, "compile_backend": "eager"})
    assert same == losses
    # AOTAutograd's backward rounds to bfloat16 elsewhere: without float8, gradients differ by 0.002 of their norm, and
    # the third loss by 1e-3. Such a change tips some numbers into float8's next value: gradients then differ by 0.01,
    # the root of 0.002 times float8's spacing of 0.06, and losses by 2e-3. The first forward is the same.
    compiled, _ = trained(compute={"compile": True, "compile_backend": "aot_eager"})
    after = torchacc.compile_report()
    assert after.graphs > before.graphs
    assert after.breaks == before.breaks
    assert compiled[0] == pytest.approx(losses[0], rel=1e-6)
    assert compiled == pytest.approx(losses, rel=4e-3)


def window_adds_up():
    model, hand = accelerated(llama()), by_hand(llama(), "tensorwise", lambda name: name != "lm_head")
    first, second = OWN[:1], OWN[1:]
    with torchacc.accumulate(model):
        (model(input_ids=first, labels=first).loss / 2).backward()
    (model(input_ids=second, labels=second).loss / 2).backward()
    hand.set_requires_gradient_sync(False)
    (loss_by_hand(hand, first) / 2).backward()
    hand.set_requires_gradient_sync(True)
    (loss_by_hand(hand, second) / 2).backward()
    check_equal(gradients_of(model), gradients_of(hand))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    own = torch.stack([gradient.norm() for gradient in gradients_of(model).values()]).norm()
    torch.testing.assert_close(norm, own, rtol=1e-5, atol=0)


def split_over_two(model, recipe, **axis):
    """Return a model on another axis, whose processes all see the rows of both."""
    compute = {"fp8_recipe": recipe, "bf16": True, "fp8": True, "fp8_min_features": 16, "fp8_emulate": True}
    config = {"backend": "native", "compute": compute, "dist": {"fsdp": {"size": NUM_RANKS // 2}, **axis}}
    return torchacc.accelerate(model, None, torchacc.Config.from_dict(config))


def losses_and_norms(model, ids):
    """Train on the same rows in each step; return the losses and the norms of the gradients."""
    optimizer, found = adamw(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.item(), model.clip_grad_norm_(1.0).item()])
        optimizer.step()
    return torch.tensor(found)


def parts_of_samples_train_as_whole_ones(recipe):
    found = losses_and_norms(split_over_two(llama(), recipe, sp={"size": 2}), IDS)
    expected = losses_and_norms(accelerated(llama(), compute={"fp8_recipe": recipe}), IDS)
    # A process rounds by the largest value of its own tokens; with "rowwise" that is of one token, but for gradients of
    # weights, which are sums over tokens.
    first, later = {"rowwise": (1e-6, 0.02), "tensorwise": (1e-3, 0.1)}[recipe]
    torch.testing.assert_close(found[0, 0], expected[0, 0], rtol=first, atol=0)
    torch.testing.assert_close(found[0, 1], expected[0, 1], rtol=first * 1000, atol=0)
    torch.testing.assert_close(found, expected, rtol=later, atol=0)


def mixtral():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape))


def spread_experts_train_as_gathered_ones(recipe):
    found = losses_and_norms(split_over_two(mixtral(), recipe, ep={"size": 2}), OWN)
    expected = losses_and_norms(accelerated(mixtral(), compute={"fp8_recipe": recipe}), OWN)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)  # a token near two experts may go to the other


def stages_train_as_shards(recipe, schedule):
    rows = list(IDS.split(1))
    staged = split_over_two(llama(), recipe, pp={"size": 2, "num_microbatches": len(rows), "schedule": schedule})
    sharded = accelerated(llama(), compute={"fp8_recipe": recipe})  # each process sees all rows, as each stage does
    count = IDS[:, 1:].numel()
    optimizers = adamw(staged), adamw(sharded)
    for _ in range(STEPS):
        loss = staged(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses = []
        for row in rows:
            with torchacc.accumulate(sharded) if row is not rows[-1] else nullcontext():
                own = sharded(input_ids=row, labels=row, num_items_in_batch=count).loss
                own.backward()
                losses.append(own.detach())
        torch.testing.assert_close(loss.detach(), sum(losses), rtol=1e-6, atol=0)
        norms = [each.clip_grad_norm_(1.0).item() for each in (staged, sharded)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = weights_of(sharded)
    for name, tensor in weights_of(staged).items():
        others = ~torch.isclose(tensor, expected[name], rtol=1e-5, atol=1e-6)
        assert others.float().mean() < 0.01, name  # those of a product that has rounded to another float8
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def evaluation_is_that_of_training():
    model = accelerated(llama())
    expected = model(input_ids=OWN, labels=OWN).loss.item()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert model(input_ids=OWN, labels=OWN).loss.item() == expected
    train(model, adamw(model), 1)
    layer = model.model.layers[0]
    hidden = torch.ones(1, 2, 32, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb(hidden, torch.arange(2)[None])
    assert layer(hidden, position_embeddings=rotary)[0].isfinite().all()  # a unit by itself


def frozen_and_unused_layers_train():
    def make_model():
        model = llama()
        model.model.layers[0].requires_grad_(False)
        return model

    losses, weights = trained(make_model=make_model)
    assert losses[-1] < losses[0]
    start = llama().state_dict()
    for name, tensor in weights.items():
        assert torch.equal(tensor, start[name]) == name.startswith("model.layers.0."), name


def experts_without_a_token_have_no_gradient():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x, expert):
            return self.experts[expert](x).float().square().mean() + self.experts[2](x).float().mean()

    torch.manual_seed(0)
    model = accelerated(Experts(), fsdp={"min_num_params": 10**6})
    model(torch.ones(2, 16), RANK % 2).backward()
    has = [expert.weight.grad is not None for expert in model.experts]
    assert has == [True, NUM_RANKS > 1, True]


def adapters_train():
    peft = pytest.importorskip("peft")

    def make_model():
        torch.manual_seed(0)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj"]))

    model = accelerated(make_model())
    assert any(name.endswith("q_proj.base_layer") for name in model._torchacc.plan.float8.names)
    before = weights_of(model)
    losses = train(model, adamw(model), 5)
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in weights_of(model).items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def deferred_model_gets_its_numbers():
    losses, weights = trained()
    again, others = trained(make_model=lambda: torchacc.deferred_init(llama))
    assert again == losses
    check_equal(others, weights)


def chunked_loss_leaves_the_head():
    losses, _ = trained(compute={"fp8_skip": ["model.layers.0"]})
    chunked, _ = trained(compute={"fp8_skip": ["model.layers.0"], "chunked_loss": 8})
    assert chunked == pytest.approx(losses, rel=2e-3)


def gradients_of_a_function_are_those_of_backward():
    model = accelerated(llama())
    loss = model(input_ids=OWN, labels=OWN).loss
    gradients = torch.autograd.grad(loss, tuple(model.parameters()))
    loss = model(input_ids=OWN, labels=OWN).loss
    loss.backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(full(gradient), full(parameter.grad))


def shards_that_are_uneven():
    losses, _ = trained()
    full_losses, _ = trained(strategy="NO_SHARD")
    assert losses[0] == full_losses[0]  # later ones are of gradients that were summed in another order
    assert losses == pytest.approx(full_losses, rel=1e-3)


def rows_are_completed():
    from torchacc.engines.native.float8_layer import with_complete_rows

    model = llama()
    layer = by_hand_layer(model.model.layers[0].mlp.up_proj)
    given = torch.randn(3, 7, 32, requires_grad=True)
    output = layer(given)
    output.square().sum().backward()
    expected = given.grad, layer.weight.grad
    given.grad = layer.weight.grad = None
    seen = []
    completed = with_complete_rows(lambda rows: seen.append(rows.shape) or layer(rows), given)
    completed.square().sum().backward()
    assert seen == [(32, 32)]
    assert torch.equal(completed, output)
    for found, wanted in zip((given.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    compiled = torch.compile(partial(with_complete_rows, layer), backend="eager", fullgraph=True)
    assert torch.equal(compiled(given), output)


def by_hand_layer(layer):
    return convert_to_float8_training(layer, config=Float8LinearConfig(emulate=True))


def named(function, *arguments):
    case = partial(function, *arguments)
    case.__name__ = "-".join([function.__name__, *(str(each) for each in arguments if each in RECIPES)])
    return case


def main(out: str) -> None:
    """Run the cases for this number of ranks, and write into a folder of the rank why each failed, or null."""
    folder = Path(out)
    of_several = [
        *(named(llama_is_torchaos, recipe) for recipe in RECIPES),
        *(named(head_of_gpt2_is_torchaos, recipe) for recipe in RECIPES),
        named(what_a_script_writes_changes_scales),
        named(weights_kept_for_backward_are_the_same),
        named(checkpoint_goes_on_where_it_was, folder),
        named(experts_without_a_token_have_no_gradient),
        named(frozen_and_unused_layers_train),
        named(gradients_of_a_function_are_those_of_backward),
    ]
    on_one = [
        layers_stay_what_they_are,
        recompute_changes_nothing,
        compiled_layers_train_alike,
        window_adds_up,
        evaluation_is_that_of_training,
        adapters_train,
        deferred_model_gets_its_numbers,
        chunked_loss_leaves_the_head,
        rows_are_completed,
    ]
    on_two = [named(stages_train_as_shards, *how) for how in (("tensorwise", "gpipe"), ("rowwise", "1f1b"))]
    on_two += [named(parts_of_samples_train_as_whole_ones, recipe) for recipe in RECIPES]
    on_two += [named(spread_experts_train_as_gathered_ones, recipe) for recipe in RECIPES]
    by_ranks = {
        1: [*of_several[:2], *on_one],
        2: [*of_several, *on_two[::2]],
        4: on_two[1::2],
        3: [shards_that_are_uneven],
    }
    (folder / str(RANK)).mkdir()
    run_cases(by_ranks[NUM_RANKS], folder / str(RANK))


if __name__ == "__main__":
    main(*sys.argv[1:])
