"""Experts spread over devices, beside the unsharded model on the whole batch."""

import copy
import math
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pipeline_cases
import pytest
import stage_shard_cases
import tensor_parallel_cases
import torch
import transformers
from casekit import ADAM, ENGINE, MULTIPROCESS, NATIVE, NUM_DEVICES, RANK, RELATIVE, SPMD
from casekit import case as case_of
from sequence_cases import compare_sharded, labelled_unevenly, make, packed, padded, part_of, plain, step
from tensor_parallel_cases import compiled_step
from torch import nn

import torchacc
from torchacc.engines.sharded_model import sharded_model
from torchacc.parallel.experts import count_experts
from torchacc.train.expert_loads import ExpertLoads

BOTH = (NATIVE, SPMD)
case = partial(case_of, (NATIVE,), num_devices=4)
case_of_both = partial(case_of, BOTH, num_devices=4)
case_of_spmd = partial(case_of, (SPMD,), num_devices=4)
case_of_two = partial(case_of, BOTH, num_devices=2)
DEEPSEEK = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "kv_heads": 2},
    "qwen3-moe": {"family": "qwen3_moe", "kv_heads": 2},
    "deepseek-v3": {"family": "deepseek_v3", **DEEPSEEK},
    "gpt-oss": {"family": "gpt_oss", "kv_heads": 2, "head_dim": 8, **FEW_EXPERTS, "use_cache": False},
}
WINDOW = [labelled_unevenly(), padded(left=True)]
KEPT = {"gc": True, "gc_policy": "save_matmuls"}


def accelerate(
    model: nn.Module, *, ep: int, dp: int = 1, num_devices: int = 4, dist: Any = None, **options: Any
) -> nn.Module:
    others = math.prod(axis["size"] for name, axis in (dist or {}).items() if name in ("tp", "sp", "pp"))
    fsdp = {"size": num_devices // ep // dp // others, "use_spmd": ENGINE == SPMD, **options.pop("fsdp", {})}
    config = {"dist": {"dp": {"size": dp}, "fsdp": fsdp, "ep": {"size": ep}, **(dist or {})}, **options}
    return torchacc.accelerate(model, None, torchacc.Config.from_dict({"backend": ENGINE.partition("-")[0], **config}))


def with_random_numbers(model: nn.Module) -> nn.Module:
    """Return a model whose routers and biases are no zeros, with which all experts would tie."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() or not parameter.std():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


compare = partial(compare_sharded, accelerate)


def trained(model: nn.Module, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    accelerate(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    step(model, [part_of(model, plain())], optimizer)
    return model, optimizer


@case_of_two(each=FAMILIES)
def spread_over_two_devices_experts_train_as_unsharded(options: dict[str, Any]) -> None:
    compare(with_random_numbers(make(**options)), WINDOW, ep=2, num_devices=2)


LAYOUTS: Mapping[str, dict[str, Any]] = {
    "and-replicas": {"ep": 2, "dp": 2},
    "in-another-order": {"ep": 2, "dist": {"topology": ["dp", "ep", "fsdp", "pp", "sp", "tp"]}},
    "recomputed": {"ep": 2, "memory": {"gc": True}},
    "kept": {"ep": 2, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "with-the-loss-in-chunks": {"ep": 2, "compute": {"chunked_loss": 3}},
    "fewer-than-devices": {"ep": 2, "num_local_experts": 2},
}
NATIVE_LAYOUTS: Mapping[str, dict[str, Any]] = {
    "and-fsdp": {"ep": 2},
    "over-all": {"ep": 4},
    "recomputed-over-all": {"ep": 4, "memory": {"gc": True}},
    "recomputed-but-for-products": {"ep": 2, "memory": KEPT},
    "gathered-ahead": {"ep": 2, "fsdp": {"forward_prefetch": True}},
}


@case_of_both(each=LAYOUTS, left_out=("in-another-order",))
@case(each=NATIVE_LAYOUTS, left_out=("and-fsdp", "over-all", "recomputed-over-all"))  # which cases with more have
@case_of_spmd(each={"in-a-loop": {"ep": 2, "compute": {"scan_layers": True}}})
def experts_train_as_unsharded(how: dict[str, Any]) -> None:
    options = {"num_local_experts": how.get("num_local_experts", 4)}
    model = make(**FAMILIES["mixtral"], **options)
    compare(model, WINDOW, **{name: value for name, value in how.items() if name not in options})


def beside(**sizes: int) -> dict[str, Any]:
    return {"ep": 2, "dist": {axis: {"size": size} for axis, size in sizes.items()}}


OUTER_TP = {"ep": 2, "dist": {"tp": {"size": 2}, "topology": ["tp", "dp", "ep", "fsdp", "pp", "sp"]}}


BESIDE_OF_BOTH: Mapping[str, tuple[str, dict[str, Any]]] = {
    "split-layers-of-the-outer-axis": ("qwen3-moe", {**OUTER_TP, "memory": {"gc": True}}),
    "split-layers-and-shared-experts": ("deepseek-v3", beside(tp=2)),
    "split-samples-recomputed": ("qwen3-moe", {**beside(sp=2), "memory": {"gc": True}}),
}
ALONG = {"ep": 2, "dist": {"tp": {"size": 2, "sequence_parallel": True}}}
BESIDE_IN_ONE_PROGRAM: Mapping[str, tuple[str, dict[str, Any]]] = {
    "split-layers-of-gpt-oss": ("gpt-oss", beside(tp=2)),
    "layers-split-along-the-sequence": ("mixtral", ALONG),
}
BESIDE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "split-layers": ("mixtral", beside(tp=2)),
    "split-samples": ("mixtral", beside(sp=2)),
    "split-layers-but-for-products": ("mixtral", {**beside(tp=2), "memory": KEPT}),
    "split-samples-but-for-products": ("qwen3-moe", {**beside(sp=2), "memory": KEPT}),
    "stages-but-for-products": ("mixtral", {**beside(pp=2), "memory": KEPT}),
    "stages": ("mixtral", beside(pp=2)),
    "stages-recomputed": ("qwen3-moe", {**beside(pp=2), "memory": {"gc": True}}),
    "stages-with-backwards-between": ("mixtral", {"ep": 2, "dist": {"pp": {"size": 2, "schedule": "1f1b"}}}),
}


@case_of_both(each=BESIDE_OF_BOTH)
@case_of_spmd(each=BESIDE_IN_ONE_PROGRAM)
@case(each=BESIDE, left_out=BESIDE.keys() - {"split-layers-but-for-products", "stages-recomputed"})
def experts_train_as_unsharded_beside(how: tuple[str, dict[str, Any]]) -> None:
    family, options = how
    compare(with_random_numbers(make(**FAMILIES[family])), WINDOW, **options)


ADAPTED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "alone": ("mixtral", {"ep": 2}),
    "latent-attention": ("deepseek-v3", {"ep": 2, "memory": {"gc": True}}),
    "split-samples": ("mixtral", beside(sp=2)),
    "stages": ("qwen3-moe", beside(pp=2)),
}


@case_of_both(each={"split-layers": ("qwen3-moe", beside(tp=2))})
@case(each=ADAPTED, left_out=("alone", "split-samples"))
def adapters_train_beside_experts(how: tuple[str, dict[str, Any]]) -> None:
    family, options = how
    model = with_random_numbers(make(**FAMILIES[family]))
    names = ["kv_b_proj", "o_proj"] if family == "deepseek-v3" else ["q_proj", "v_proj", "o_proj"]
    compare(tensor_parallel_cases.with_adapters(model, names), WINDOW, **options)


@case()
def experts_of_interleaved_stages_train_as_unsharded() -> None:
    model = with_random_numbers(pipeline_cases.make("mixtral", layers=4, num_local_experts=4))
    compare(model, WINDOW, ep=2, dist={"pp": {"size": 2, "schedule": "interleaved"}})


@case_of((SPMD,), num_devices=8)
def experts_of_shards_and_split_layers_train_as_unsharded() -> None:
    compare(with_random_numbers(make(**FAMILIES["qwen3-moe"])), WINDOW, num_devices=8, **beside(tp=2))


@case_of((NATIVE,), num_devices=8)
def experts_of_stages_of_split_samples_train_as_unsharded() -> None:
    model = with_random_numbers(make(**FAMILIES["mixtral"]))
    compare(model, WINDOW, num_devices=8, **beside(pp=2, sp=2))


WITHOUT_EXPERTS = {"one-after-another": ([0, 1], "gpipe"), "interleaved": ([0, 2], "interleaved")}


@case(each=WITHOUT_EXPERTS)
def devices_whose_stages_have_no_experts_take_part(how: tuple[list[int], str]) -> None:
    dense, schedule = how
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = pipeline_cases.make("qwen3_moe", layers=4, head_dim=8, **experts, mlp_only_layers=dense)
    compare(with_random_numbers(model), WINDOW, ep=2, dist={"pp": {"size": 2, "schedule": schedule}})


@case(each={"eager": "eager", "batched": "batched_mm", "grouped": "grouped_mm"})
def each_implementation_of_experts_trains_as_unsharded(name: str) -> None:
    model = make(**FAMILIES["qwen3-moe"])
    model.set_experts_implementation(name)
    compare(model, [padded(left=False), packed()], ep=2)


@case_of_both(each={"recomputed": {"ep": 4, "memory": {"gc": True}}})
@case(each={"kept": {"ep": 4}, "split": beside(tp=2)})
def devices_whose_experts_get_no_tokens_take_part(how: dict[str, Any]) -> None:
    """All tokens go to the first two experts: of one device here, which all others wait for."""
    for frozen in (False, True):
        model = make(**FAMILIES["mixtral"])
        model.model.layers[0].mlp.gate.register_forward_hook(_send_to_first)
        if frozen:  # nothing before the experts has a gradient
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".layers.1." in name or "experts" in name)
        compare(model, [plain()], **how)


def _send_to_first(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, scores, indices = output
    return logits, scores, torch.arange(indices.shape[1], device=indices.device).expand_as(indices)


@case_of_both()
def the_loss_that_balances_experts_is_over_all_tokens() -> None:
    for family, how in (("mixtral", {"ep": 2}), ("qwen3-moe", {"ep": 2}), ("mixtral", beside(tp=2))):
        model = make(**FAMILIES[family], output_router_logits=True, router_aux_loss_coef=0.5)
        compare(model, [padded(left=True)], **how)


@case_of_both()
def spread_experts_train_in_bfloat16_as_over_shards() -> None:
    batch, losses = padded(left=False), []
    for ep in (1, 4):
        model = accelerate(make(**FAMILIES["mixtral"]), ep=ep, compute={"bf16": True})
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        losses.append([step(model, [part_of(model, batch)], optimizer) for _ in range(2)])
    assert losses[1] == [pytest.approx(each, rel=1e-2) for each in losses[0]]


@case_of_spmd()
def a_step_has_the_experts_of_a_device_only() -> None:
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1}  # as no other case has
    of_all, temporaries = 8 * 256 * 64, []
    for ep in (2, 4):
        model = accelerate(make("mixtral", **size, num_local_experts=8), ep=ep)
        batch, optimizer = part_of(model, plain(2)), torch.optim.SGD(model.parameters(), lr=0.1)
        program = compiled_step(lambda: step(model, [batch], optimizer))  # noqa: B023 - it runs at once
        shapes = re.findall(r"f32\[([\d,]+)\]", program.read_text())
        assert f"{8 // ep},512,64" in shapes
        assert max(math.prod(map(int, dims.split(","))) for dims in shapes) == 2 * of_all // ep, "of all experts"
        buffers = program.with_name(f"{program.stem}-buffer-assignment.txt").read_text()
        temporaries += [max(map(int, re.findall(r"size (\d+), preallocated-temp", buffers)))]
    assert temporaries[0] < 2 * 3 * of_all * 4 // 2, "more than the weights of half of the experts, and gradients"
    assert temporaries[1] < 0.55 * temporaries[0]


@case()
def a_device_holds_and_gathers_its_experts_only() -> None:
    model = make(**FAMILIES["mixtral"])
    experts = model.model.layers[0].mlp.experts
    full = {name: parameter.detach().clone() for name, parameter in experts.named_parameters()}
    seen: list[dict[str, torch.Tensor]] = []
    accelerate(model, ep=2)

    def look(module: nn.Module, args: Any) -> None:
        seen.append({name: parameter.detach().clone() for name, parameter in experts.named_parameters()})

    experts.act_fn.register_forward_pre_hook(look)
    model(plain()["input_ids"])
    held = sharded_model(model).plan.experts[0].held[RANK % 2]
    assert len(held) == 2
    assert min(sharded_model(model).engine.expert_mesh.shape) > 1, "all make each group, also one of a single process"
    assert experts.num_experts == 4, "a script sees the full number"
    for name, parameter in experts.named_parameters():
        assert parameter.shape == full[name].shape, "a script sees the full shape"
        assert parameter.to_local().numel() == full[name].numel() // 4
        assert torch.equal(seen[0][name].cpu(), full[name][list(held)])
        assert torch.equal(parameter.full_tensor().cpu(), full[name])
        assert torch.equal((parameter.detach() * 2 + 1).cpu(), full[name] * 2 + 1)


@case()
def at_rest_a_device_holds_what_it_would_without_spread_experts() -> None:
    spread, gathered = (accelerate(make(**FAMILIES["mixtral"]), ep=ep) for ep in (2, 1))
    found, expected = sharded_model(spread), sharded_model(gathered)
    assert found.shards.coordinates == expected.shards.coordinates
    for parameter, other in zip(spread.parameters(), gathered.parameters(), strict=True):
        assert found.shards[parameter] == expected.shards[other]
        assert parameter.placements == other.placements
        assert torch.equal(parameter.to_local(), other.to_local())
    optimizer = torch.optim.SGD(gathered.parameters(), lr=0.1)
    step(gathered, [part_of(gathered, plain())], optimizer)
    spread.load_state_dict(torchacc.full_state_dict(gathered))
    _check_same(torchacc.full_state_dict(spread), torchacc.full_state_dict(gathered))
    with torch.inference_mode():
        logits = [model(plain()["input_ids"]).logits for model in (spread, gathered)]
    torch.testing.assert_close(*logits)


LOADED: Mapping[str, dict[str, Any]] = {"to-fsdp": {"ep": 1}, "to-split-layers": beside(tp=2)}
LOADED_NATIVELY: Mapping[str, dict[str, Any]] = {
    "to-more": {"ep": 4},
    "to-replicas": {"ep": 2, "dp": 2},
    "to-split-samples": beside(sp=2),
    "to-stages": beside(pp=2),
}


@case_of_both(each=LOADED, left_out=("to-fsdp",))
@case(each=LOADED_NATIVELY, left_out=LOADED_NATIVELY)
def a_checkpoint_of_spread_experts_loads_at(after: dict[str, Any]) -> None:
    folder = Path(sys.argv[2]) / f"ep-saved-{[*LOADED.values(), *LOADED_NATIVELY.values()].index(after)}"
    make_model = partial(make, **FAMILIES["mixtral"])
    saved, optimizer = trained(make_model(), ep=2)
    torchacc.checkpoint.save(folder, model=saved, optimizer=optimizer)
    expected = torchacc.full_state_dict(saved)
    state = torchacc.optim_state_dict(saved, optimizer)
    loaded = accelerate(torchacc.deferred_init(make_model), **after)
    new_optimizer = torch.optim.AdamW(loaded.parameters(), lr=1.0)
    torchacc.checkpoint.load(folder, model=loaded, optimizer=new_optimizer)
    _check_same(torchacc.full_state_dict(loaded), expected)
    _check_same(torchacc.optim_state_dict(loaded, new_optimizer)["state"], state["state"])
    following = [step(each, [part_of(each, plain())], o) for each, o in ((saved, optimizer), (loaded, new_optimizer))]
    assert following[1] == pytest.approx(following[0], rel=RELATIVE)
    again = folder.with_name(f"{folder.name}-again")
    torchacc.checkpoint.save(again, model=loaded, optimizer=new_optimizer)
    back = accelerate(torchacc.deferred_init(make_model), ep=1 if "dist" in after else 2)
    torchacc.checkpoint.load(again, model=back)
    _check_same(torchacc.full_state_dict(back), torchacc.full_state_dict(loaded))


@case_of(BOTH, num_devices=8)
def a_checkpoint_of_spread_experts_goes_on() -> tuple[dict[str, Any], tuple[float, float]]:
    """Load what the launch before has saved, or train; save, and return the states and what a next step comes to."""
    own = Path(sys.argv[2])
    how = beside(tp=2) if NUM_DEVICES == 8 else {"ep": 2}
    model = accelerate(make(**FAMILIES["mixtral"]), num_devices=NUM_DEVICES, **how)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    if own.name == "0":
        step(model, [part_of(model, plain())], optimizer)
    else:
        torchacc.checkpoint.load(own.with_name(str(int(own.name) - 1)) / "saved", model=model, optimizer=optimizer)
    weights, states = stage_shard_cases.states_of(model, optimizer)
    torchacc.checkpoint.save(own / "saved", model=model, optimizer=optimizer)
    moments = {f"{i} {key}": value for i, state in states["state"].items() for key, value in state.items()}
    return {**weights, **moments}, step(model, [part_of(model, plain())], optimizer)


def _check_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        for key in expected:
            _check_same(found[key], expected[key])
    else:
        assert found == expected


@case_of_both(each={"beside-split-layers": beside(tp=2)})
@case(each={"over-all": {"ep": 4}})
def spread_experts_evaluate_and_generate_ragged_samples(how: dict[str, Any]) -> None:
    model = make(**FAMILIES["qwen3-moe"])
    whole = copy.deepcopy(model).eval()
    accelerate(model, **how).eval()
    ids = plain()["input_ids"][:1, : 5 + 2 * sharded_model(model).engine.data_parallel_ranks.start]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.cpu(), whole(ids).logits)
        generated = model.generate(ids.to(model.device), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(generated.cpu(), whole.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False))


@case()
def what_spread_experts_cannot_do_is_refused() -> None:
    mixtral = partial(make, **FAMILIES["mixtral"])
    for options, expected in (
        ({"ep": 2, "compute": {"compile": True, "compile_backend": "eager"}}, "compute.compile"),
        ({"ep": 2, "fsdp": {"sharding_strategy": "NO_SHARD"}}, "NO_SHARD"),
        ({"ep": 2, "fsdp": {"cpu_offload": True}}, "cpu_offload"),
        ({"ep": 2, "dist": {"tp": {"size": 2, "plan": {"lm_head": ["tp", None]}}}}, "dist.tp.plan"),
        ({**beside(tp=2), "compute": {"fp8": True}}, "fp8"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            accelerate(mixtral(), **options)
    with pytest.raises(torchacc.ConfigError, match="6 experts of .*, split over tp 2, are sharded"):
        accelerate(make(**FAMILIES["mixtral"] | {"num_local_experts": 6}), **beside(tp=2))
    with pytest.raises(torchacc.ConfigError, match="output_router_logits.* routers of all layers"):
        accelerate(make(**FAMILIES["mixtral"], output_router_logits=True), **beside(pp=2))
    staged = accelerate(mixtral(), **beside(pp=2))
    with pytest.raises(torchacc.DataError, match="batches of 1 to 2 microbatches"):
        staged(**{name: tensor[: 1 + RANK % 2] for name, tensor in plain().items()})
    staged.config.output_router_logits = True
    with pytest.raises(torchacc.EngineError, match="output_router_logits = True, set after"):
        staged(**plain())
    model = accelerate(mixtral(), ep=2)
    loss = model(**part_of(model, plain())).loss
    with pytest.raises(torchacc.EngineError, match="dist.ep"):
        torch.autograd.grad(loss, model.model.layers[0].mlp.experts.down_proj)


@case_of_spmd()
def what_experts_spread_in_one_program_cannot_do_is_refused() -> None:
    for options, expected in (
        ({"ep": 1, "dist": {"sp": {"size": 2}}}, "XLA cannot partition the experts of .* unless they are spread"),
        ({"ep": 2, "dist": {"tp": {"size": 2, "plan": {"lm_head": ["tp", None]}}}}, "dist.tp.plan"),
        ({"ep": 2, "fsdp": {"sharding_strategy": "NO_SHARD"}}, "NO_SHARD"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            accelerate(make(**FAMILIES["mixtral"]), **options)


@case_of_both()
def models_whose_experts_cannot_be_spread_are_refused() -> None:
    mixtral = partial(make, **FAMILIES["mixtral"])
    tied, mine, around = mixtral(), mixtral(), mixtral()
    around.model.layers[1].mlp.forward = lambda hidden: hidden
    tied.model.layers[1].mlp.experts.gate_up_proj = tied.model.layers[0].mlp.experts.gate_up_proj
    mine.model.layers[0].mlp.experts.forward = lambda hidden, chosen, weights: hidden
    for model, ep, expected in (
        (make("llama"), 2, "no module of experts"),
        (make(**FAMILIES["mixtral"] | {"num_local_experts": 6}), 4, "the 6 experts of"),
        (transformers.AutoModelForCausalLM.from_config(_olmoe()), 2, "'olmoe'"),
        (tied, 2, "tied"),
        (mine, 2, "not transformers' own"),
        (around, 2, "not transformers' own"),
    ):
        with pytest.raises(torchacc.ConfigError, match=expected):
            accelerate(model, ep=ep)


def _olmoe() -> Any:
    size = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.AutoConfig.for_model("olmoe", vocab_size=96, num_experts=4, num_experts_per_tok=2, **size)


def check_loads(family: str, **how: Any) -> None:
    """Compare the loads of experts, in training, with how often the unsharded model chooses each."""
    model = with_random_numbers(make(**FAMILIES[family]))
    alone, batch, chosen = copy.deepcopy(model), plain(), {}
    for name, module in alone.named_modules():
        if count_experts(module) is not None:
            module.register_forward_pre_hook(lambda module, args, name=name: chosen.update({name: args[1]}))
    alone(**batch)
    accelerate(model, **how)
    loads = ExpertLoads(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step(model, [part_of(model, batch)], optimizer)
    compiled = torchacc.compile_report().graphs
    loads.take()
    step(model, [part_of(model, batch)], optimizer)
    assert torchacc.compile_report().graphs == compiled, "a program for the loads"
    model.eval()
    with torch.no_grad():
        model(**part_of(model, batch))
    found = loads.take()
    assert found.keys() == chosen.keys()
    for name, experts in chosen.items():
        counts = torch.bincount(experts.flatten(), minlength=4)
        assert len(set(counts.tolist())) > 1
        assert found[name] == pytest.approx((counts / counts.sum()).tolist(), abs=1e-6)
    assert loads.take() == {}


@case_of_two(each={family: family for family in FAMILIES}, left_out=("mixtral", "qwen3-moe"))  # others have these
def loads_of_experts_are_those_of_all_tokens(family: str) -> None:
    check_loads(family, ep=2, num_devices=2)


@case_of((MULTIPROCESS,))
def loads_of_experts_that_each_process_gathers_are_those_of_all_tokens() -> None:
    check_loads("mixtral", ep=1, num_devices=2)


@case(
    each=BESIDE_OF_BOTH | BESIDE,
    left_out=(BESIDE_OF_BOTH | BESIDE).keys() - {"split-layers-and-shared-experts", "stages-with-backwards-between"},
)
def loads_of_experts_are_those_of_all_tokens_beside(how: tuple[str, dict[str, Any]]) -> None:
    check_loads(how[0], **how[1])


@case()
def adapters_of_the_experts_themselves_are_refused() -> None:
    peft = pytest.importorskip("peft")
    options = {"target_parameters": ["experts.gate_up_proj"], "target_modules": []}
    model = peft.get_peft_model(make(**FAMILIES["mixtral"]), peft.LoraConfig(r=2, **options))
    with pytest.raises(torchacc.ConfigError, match="a forward that is not transformers' own"):
        compare(model, WINDOW, ep=2)
