"""Every engine, at any number of devices, trains as one unsharded float32 process does.

The reference is plain PyTorch, in a process of its own that knows nothing of torchacc's engines. The global batch is
the same everywhere. What is compared, and how closely:

- losses and gradient norms: relative 1e-5, at every step;
- parameters after the last step: relative 1e-5, or absolute 1e-6 with SGD, and 5e-6 with AdamW, of which one step alone
  moves a parameter by up to 3e-3. Its eps is chosen so that it does not blow up rounding errors (`training_cases.py`).

BatchNorm and losses over ragged labels are where the engines differ by nature, and the last tests here say how.
"""

from math import ceil, prod

import pytest
import torch

pytest.importorskip("transformers")
import contract_worker  # noqa: F401 - registers the cases
from launching import SECONDS_TO_RUN

pytestmark = pytest.mark.timeout(SECONDS_TO_RUN + 60)
ENGINES = [
    "native-1",
    "native-2",
    "xla-multiprocess-1",
    "xla-multiprocess-2",
    "xla-multiprocess-4",
    "xla-spmd-1",
    "xla-spmd-2",
    "xla-spmd-4",
]
ON_TWO = ["native-2", "xla-multiprocess-2", "xla-spmd-2"]
ON_FOUR = ["native-4", "xla-multiprocess-4", "xla-spmd-4"]
PROCESS_PER_DEVICE = ["native-2", "xla-multiprocess-2"]
MODELS = ["gpt2", "llama", "bert", "t5", "mixtral", "cnn"]
TIED = {
    "gpt2": ["transformer.wte.weight", "lm_head.weight"],
    "t5": ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
}
STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]

RELATIVE = 1e-5
ABSOLUTE = {"sgd": 1e-6, "adamw": 5e-6}  # of parameters, by recipe

covers = pytest.mark.covers


def together(*marks):
    """Return marks as one, to write above a test."""

    def mark(test):
        for each in marks:
            test = each(test)
        return test

    return mark


every_model = covers(engines=ENGINES, models=MODELS, variants=["adamw", "sgd"])
replicated = covers(engines=ON_TWO, models=["gpt2"], variants=["no-shard"])
# The plan is made without an engine, and the embedding of `wrap-by-class` is tied to the head, in another unit.
units_by_class = covers(engines=ON_TWO, models=["gpt2"], variants=["wrap-by-class"])
units_by_size = covers(engines=["xla-multiprocess-2"], models=["gpt2"], variants=["wrap-by-size"])
units_by_name = covers(engines=["native-2"], models=["gpt2"], variants=["wrap-by-name"])
kept_weights = together(
    covers(engines=ON_TWO, models=["gpt2"], variants=["shard-grad-op"]),
    covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["shard-grad-op"], in_full=True),
)
recomputed = covers(engines=ON_TWO, models=["gpt2", "t5", "cnn"], variants=["recompute"])
recomputed_but_products = covers(
    engines=["native-2"], models=["gpt2", "t5", "mixtral", "cnn"], variants=["recompute-but-products"]
)
recomputed_and_accumulated = covers(engines=ON_TWO, models=["gpt2"], variants=["recompute-accumulated"])
recomputed_in_replicas = covers(engines=ON_FOUR, models=["gpt2"], variants=["recompute-hybrid"])
recomputed_from_flat = covers(engines=["xla-multiprocess-2"], models=["gpt2"], variants=["recompute-flat"])
hybrid = covers(engines=ON_FOUR, models=["gpt2", "cnn"], variants=["hybrid"])
handed_in = covers(engines=ON_TWO, models=["gpt2", "t5"], variants=["handed-in"])
deferred = covers(engines=ON_TWO, models=["gpt2", "t5"], variants=["deferred"])
flat = covers(engines=["xla-multiprocess-2"], models=["gpt2"], variants=["flat", "flat-handed-in"])
unequal = covers(engines=PROCESS_PER_DEVICE, models=["gpt2"], variants=["unequal-seeds", "unequal-seeds-synced"])
layers_split = covers(
    engines=["xla-spmd-4"], models=["gpt2", "llama", "bert", "t5", "mixtral"], variants=["tp-sequence"]
)
layers_split_alone = together(
    covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["tp-alone"]),
    covers(engines=["xla-spmd-4"], models=["llama", "bert", "t5", "mixtral"], variants=["tp-alone"], in_full=True),
)
layers_split_otherwise = together(
    covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["tp-replicas", "tp-recompute"]),
    covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["tp", "tp-handed-in"], in_full=True),
)
samples_split = covers(engines=["xla-spmd-4"], models=["gpt2", "llama", "bert", "t5"], variants=["sp"])
samples_split_alone = covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["sp-alone"])
samples_split_beside_layers = covers(engines=["xla-spmd-4"], models=["llama"], variants=["sp-tp-recompute"])
samples_split_and_scanned = covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["sp-scan"])
levers = covers(engines=["native-2"], models=["gpt2"], variants=["offload", "prefetch"])
layers_split_natively = together(
    covers(engines=["native-4"], models=["llama", "t5"], variants=["tp"]),
    covers(engines=["native-4"], models=["bert"], variants=["tp", "tp-recompute"], in_full=True),
)
layers_split_and_compiled = covers(engines=["native-2"], models=["bert"], variants=["tp-compile-graphs"])
experts_with_layers_split = covers(engines=["native-4"], models=["mixtral"], variants=["tp"])
layers_split_natively_otherwise = covers(
    engines=["native-4"],
    models=["bert"],
    variants=["tp-alone", "tp-replicas", "tp-handed-in", "tp-recompute-but-products", "tp-deferred"],
)
evaluated = covers(engines=ON_TWO, models=["gpt2", "t5"], variants=["evaluate"])
per_device = together(
    covers(engines=PROCESS_PER_DEVICE, models=["gpt2"], variants=["ragged-per-device"]),
    covers(engines=["xla-multiprocess-4"], models=["gpt2"], variants=["ragged-per-device"], in_full=True),
)
whole_batch = covers(engines=["xla-spmd-2"], models=["gpt2"], variants=["ragged-whole-batch"])
batchnorm_per_device = together(
    covers(engines=PROCESS_PER_DEVICE, models=["cnn-batchnorm"], variants=["per-device"]),
    covers(engines=["xla-multiprocess-4"], models=["cnn-batchnorm"], variants=["per-device"], in_full=True),
)
scanned = together(
    covers(engines=["xla-spmd-1", "xla-spmd-2"], models=["gpt2", "llama"], variants=["scan"]),
    covers(engines=["xla-spmd-4"], models=["gpt2", "llama"], variants=["scan"], in_full=True),
)
compiled = together(
    covers(engines=["native-2"], models=["gpt2"], variants=["compile-recompute"]),
    covers(engines=["native-1"], models=["gpt2"], variants=["compile-parts"]),  # each rank would compile the same
    covers(engines=["native-2"], models=["gpt2"], variants=["compile", "compile-parts"], in_full=True),
)
compiled_graphs = covers(engines=["native-2"], models=["mixtral", "cnn"], variants=["compile-graphs"])
batchnorm_whole_batch = together(
    covers(engines=["xla-spmd-2"], models=["cnn-batchnorm"], variants=["whole-batch"]),
    covers(engines=["xla-spmd-4"], models=["cnn-batchnorm"], variants=["whole-batch"], in_full=True),
)

# With `--full-contract`
units_of_each_engine = covers(engines=ON_TWO, models=["gpt2"], variants=["wrap-by-size", "wrap-by-name"], in_full=True)
more_in_full = (
    covers(engines=["xla-multiprocess-4"], models=["gpt2"], variants=["flat", "flat-handed-in"], in_full=True),
    covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["ragged-whole-batch"], in_full=True),
    covers(engines=["xla-spmd-4"], models=["llama", "bert", "t5"], variants=["sp-alone"], in_full=True),
    covers(engines=["xla-spmd-4"], models=["gpt2", "llama"], variants=["sp-tp-recompute", "sp-scan"], in_full=True),
    covers(engines=["native-2"], models=["llama"], variants=["recompute-but-products"], in_full=True),
    covers(engines=["native-2"], models=["llama", "bert"], variants=["compile-graphs"], in_full=True),
    covers(engines=["native-2"], models=["gpt2", "t5"], variants=["tp-compile-graphs"], in_full=True),
    covers(engines=["native-2"], models=["gpt2"], variants=["tp-compile-recompute"], in_full=True),
    covers(engines=["native-4"], models=["llama"], variants=["tp-compile-recompute"], in_full=True),
)


same_numbers = together(
    every_model,
    replicated,
    units_by_class,
    units_by_size,
    units_by_name,
    kept_weights,
    recomputed,
    recomputed_but_products,
    recomputed_and_accumulated,
    recomputed_in_replicas,
    recomputed_from_flat,
    hybrid,
    handed_in,
    deferred,
    flat,
    layers_split,
    layers_split_alone,
    layers_split_otherwise,
    samples_split,
    samples_split_alone,
    samples_split_beside_layers,
    samples_split_and_scanned,
    layers_split_natively,
    layers_split_and_compiled,
    experts_with_layers_split,
    layers_split_natively_otherwise,
    unequal,
    levers,
    evaluated,
    per_device,
    whole_batch,
    scanned,
    compiled,
    compiled_graphs,
    batchnorm_per_device,
    batchnorm_whole_batch,
    units_of_each_engine,
    *more_in_full,
)
"""A test that runs for all that must train as the reference does."""


# The same numbers


@same_numbers
def test_losses(outcome, reference):
    assert outcome["losses"] == pytest.approx(reference["losses"], rel=RELATIVE)
    assert len(set(outcome["losses"])) == 4


@same_numbers
def test_gradient_norms(outcome, reference):
    assert outcome["norms"] == pytest.approx(reference["norms"], rel=RELATIVE)


@same_numbers
def test_parameters(outcome, reference):
    absolute = ABSOLUTE[outcome["recipe"]]
    trained = {name for group in reference["names"]["parameters"] for name in group}
    for name in sorted(trained):
        found, expected = outcome["state"][name], reference["state"][name]
        torch.testing.assert_close(
            found, expected, rtol=RELATIVE, atol=absolute, msg=lambda text, name=name: f"{name}: {text}"
        )


@evaluated
def test_evaluation_without_gradients(outcome, reference):
    assert len(outcome["held_out_losses"]) == 8
    assert outcome["held_out_losses"] == pytest.approx(reference["held_out_losses"], rel=RELATIVE)


@covers(engines=ENGINES, models=MODELS, variants=["adamw"])
def test_clipping_was_put_to_use(outcome):
    assert min(outcome["norms"]) > outcome["max_norm"]


@covers(engines=PROCESS_PER_DEVICE, models=["gpt2", "bert", "t5"], variants=["adamw", "sgd"])
@covers(engines=["xla-multiprocess-4"], models=["gpt2", "bert", "t5"], variants=["adamw", "sgd"], in_full=True)
def test_each_rank_sees_the_loss_of_the_global_batch(outcome, case):
    assert len(outcome["losses_by_rank"]) == case.num_devices
    assert all(losses == outcome["losses_by_rank"][0] for losses in outcome["losses_by_rank"])


@covers(engines=PROCESS_PER_DEVICE, models=["cnn"], variants=["adamw", "sgd"])
@covers(engines=["xla-multiprocess-4"], models=["cnn"], variants=["adamw", "sgd"], in_full=True)
def test_a_loss_that_the_script_computes_is_the_devices_own(outcome):
    assert outcome["losses_by_rank"][0] != outcome["losses_by_rank"][1]


# Frozen, tied, named


@covers(engines=ENGINES, models=MODELS, variants=["sgd"])
@covers(engines=["xla-multiprocess-2"], models=["gpt2"], variants=["flat"])
def test_what_is_frozen_does_not_change_and_all_else_does(outcome):
    parameters = {name for group in outcome["names"]["parameters"] for name in group}
    same = {name for name in parameters if torch.equal(outcome["state"][name], outcome["before"][name])}
    assert same == set(outcome["frozen"])
    assert 0 < len(same) < len(parameters)


@every_model
@covers(engines=ON_TWO, models=["gpt2"], variants=["wrap-by-class", "handed-in", "bf16"])
@deferred
def test_names_and_ties_stay(outcome, case):
    assert outcome["names_after"] == outcome["names"]
    tied = [group for group in outcome["names_after"]["parameters"] if len(group) > 1]
    assert [sorted(group) for group in tied] == ([sorted(TIED[case.model])] if case.model in TIED else [])


@same_numbers
def test_the_full_state_has_the_original_names_and_shapes(outcome):
    assert [*outcome["state"]] == outcome["names"]["state_dict"]
    assert {name: tensor.shape for name, tensor in outcome["state"].items()} == {
        name: tensor.shape for name, tensor in outcome["before"].items()
    }


@covers(engines=ENGINES, models=MODELS, variants=["adamw"])
def test_the_model_is_what_it_was(outcome, case):
    # FSDP2 derives a class from the model's own, FSDPGPT2LMHeadModel, which transformers knows to read past.
    own, *ancestors = outcome["classes_after"]
    assert outcome["class"] == (ancestors[1] if case.kind == "native" and case.num_devices > 1 else own)
    if case.model != "cnn":
        assert outcome["config_class"] == outcome["class"].partition("For")[0].removesuffix("LMHeadModel") + "Config"


@covers(engines=["xla-multiprocess-2", "xla-spmd-2"], models=["mixtral"], variants=["adamw"])
def test_experts_are_chosen_that_compile_once(outcome):
    assert outcome["experts"] == "batched_mm"


# The share of a device


@every_model
@hybrid
@kept_weights
def test_each_device_holds_its_share(outcome, case):
    described = outcome["description"]
    unique = [outcome["before"][group[0]] for group in outcome["names"]["parameters"]]
    assert described["num_parameters"] == sum(tensor.numel() for tensor in unique)
    assert described["num_devices"] == case.num_devices
    # One process with one device is one program, under whatever launcher.
    assert described["engine"] == ("xla-spmd" if case.engine == "xla-multiprocess-1" else case.kind)

    num_shards = case.num_devices // (2 if case.variant == "hybrid" else 1)
    assert described["mesh"] == f"dp {case.num_devices // num_shards} x fsdp {num_shards}"
    if case.kind == "xla-spmd":  # one dimension is split where it divides, else the parameter is whole on each device
        share = sum(t.numel() // (1 if all(d % num_shards for d in t.shape) else num_shards) for t in unique)
        assert outcome["num_elements_held"] == described["num_parameters"]
    else:  # rows are padded
        share = sum(ceil(tensor.shape[0] / num_shards) * prod(tensor.shape[1:]) for tensor in unique)
        assert outcome["num_elements_held"] == share
    assert described["num_parameters_per_device"] == share


@covers(engines=ON_TWO, models=["gpt2"], variants=["no-shard"])
def test_no_shard_is_a_mesh_of_replicas(outcome):
    described = outcome["description"]
    assert described["mesh"] == "dp 2 x fsdp 1"
    assert described["num_parameters_per_device"] == described["num_parameters"]


@units_by_class
@units_by_size
@units_by_name
@units_of_each_engine
@covers(engines=ON_TWO, models=["gpt2"], variants=["adamw"])
def test_units_are_those_that_were_asked_for(outcome, case):
    # The model itself, and: its 2 blocks; 3 matrices of each, the head, and GPT2Model, which is left with much in small
    # pieces, so that the tied weight lies in two units; each block and its MLP; each MLP, and both embeddings.
    expected = {"adamw": 3, "wrap-by-size": 1 + 2 * 3 + 2, "wrap-by-name": 1 + 2 * 2, "wrap-by-class": 1 + 2 + 2}
    assert outcome["description"]["num_units"] == expected[case.variant]


# Optimizers


@handed_in
@deferred
@covers(engines=["xla-spmd-4"], models=["gpt2"], variants=["tp-handed-in"])
@covers(engines=ENGINES, models=["gpt2"], variants=["adamw"])
def test_groups_of_parameters_stay(outcome, reference):
    assert outcome["group_sizes"] == reference["group_sizes"]
    assert [decay for _, decay in outcome["group_sizes"]] == [0.1, 0.0]
    assert not outcome["optimizer_holds_strangers"]


@covers(engines=["xla-multiprocess-2"], models=["gpt2"], variants=["flat-handed-in"])
@covers(engines=["xla-multiprocess-4"], models=["gpt2"], variants=["flat-handed-in"], in_full=True)
def test_flattening_goes_by_the_groups_of_an_optimizer_handed_in(outcome):
    # A block has both kinds of parameters, and so has the model itself.
    assert outcome["group_sizes"] == [[3, 0.1], [3, 0.0]]
    assert not outcome["optimizer_holds_strangers"]


@covers(engines=["xla-multiprocess-2"], models=["gpt2"], variants=["flat-groups-after"])
def test_groups_made_after_flattening_are_refused(refusal):
    assert "flatten_parameters" in refusal
    assert "optimizer=optimizer" in refusal


# Processes that start differently


# (That all take rank 0's values is seen in the numbers above.)


@covers(engines=PROCESS_PER_DEVICE, models=["gpt2"], variants=["unequal-seeds"])
def test_processes_that_start_from_other_values_are_told_of_it(launched, case):
    assert "differ between the ranks" in launched(case.engine).printed


@covers(engines=PROCESS_PER_DEVICE, models=["gpt2"], variants=["unequal-shapes"])
def test_processes_with_other_models_are_refused(refusal):
    assert "the processes built different models" in refusal


# Less precision. bfloat16 has 8 bits of mantissa, and float16 11: a relative 4e-3 and 5e-4 in each product, which
# average out over 128 tokens.

bf16 = covers(engines=[*ON_TWO, "xla-spmd-4"], models=["gpt2", "llama"], variants=["bf16"])
bf16_layers_split = covers(engines=["native-4", "xla-spmd-4"], models=["llama"], variants=["tp-bf16"])
bf16_sums = covers(engines=PROCESS_PER_DEVICE, models=["gpt2"], variants=["bf16-sums"])
bf16_masters = covers(engines=ON_TWO, models=["gpt2"], variants=["bf16-masters"])
fp16 = covers(engines=["native-1", "native-2"], models=["gpt2"], variants=["fp16"])


@bf16
@bf16_layers_split
@bf16_sums
@fp16
def test_low_precision_is_near_float32(outcome, plain_reference):
    assert outcome["losses"] == pytest.approx(plain_reference["losses"], rel=1e-3)
    assert outcome["norms"] == pytest.approx(plain_reference["norms"], rel=1e-2)
    assert outcome["losses"] != pytest.approx(plain_reference["losses"], rel=1e-6), "all was computed in float32"


@bf16
@bf16_layers_split
@bf16_sums
@fp16
def test_the_engines_agree_in_low_precision(outcome, reference):
    """Each is as near to the unsharded run under autocast, so that they are near to one another."""
    assert outcome["losses"] == pytest.approx(reference["losses"], rel=1e-3)


@bf16
@bf16_sums
@fp16
def test_masters_and_the_optimizers_state_stay_in_float32(outcome, case):
    assert outcome["description"]["compute_dtype"] == ("float16" if case.variant == "fp16" else "bfloat16")
    assert outcome["dtypes"] == ["torch.float32"]
    assert outcome["state_dtypes"] == ["torch.float32"]
    assert {str(tensor.dtype) for tensor in outcome["state"].values()} == {"torch.float32"}


@bf16_masters
def test_masters_in_bfloat16_round_each_step(outcome, plain_reference):
    assert outcome["dtypes"] == outcome["state_dtypes"] == ["torch.bfloat16"]
    assert {str(tensor.dtype) for tensor in outcome["state"].values()} == {"torch.bfloat16"}
    assert outcome["losses"] == pytest.approx(plain_reference["losses"], rel=5e-3)


@bf16
@fp16
@covers(engines=ON_TWO, models=["gpt2"], variants=["adamw"])
def test_dtypes_of_what_a_model_returns(outcome, case):
    # transformers computes the loss from the logits in float32.
    logits = {"adamw": "float32", "bf16": "bfloat16", "fp16": "float16"}[case.variant]
    assert outcome["output_dtypes"] == {"loss": "torch.float32", "logits": f"torch.{logits}"}


# Compiles


@scanned
@covers(engines=[engine for engine in ENGINES if engine.startswith("xla")], models=MODELS, variants=["adamw", "sgd"])
@layers_split
@layers_split_alone
@covers(engines=["xla-multiprocess-2", "xla-spmd-2"], models=["gpt2"], variants=["recompute", "recompute-accumulated"])
def test_a_training_step_compiles_in_the_first_step_only(outcome):
    first, second, *later = outcome["num_compiles"]
    assert first > 0
    assert [second, *later] == [first] * (1 + len(later))


# Where the engines differ by nature: a process with one device computes with the batch of that device, and one program
# for all devices with the whole one. The two are compared with their own references above; here it is seen that these
# are not the same.


@per_device
@batchnorm_per_device
def test_what_depends_on_the_batch_is_each_devices_own(outcome, plain_reference, case):
    assert outcome["losses"] != pytest.approx(plain_reference["losses"], rel=10 * RELATIVE)


@batchnorm_whole_batch
def test_batchnorms_statistics_are_those_of_the_global_batch(outcome, reference):
    found, expected = ({k: run["state"][f"stages.1.norm.{k}"] for k in STATISTICS} for run in (outcome, reference))
    assert found["num_batches_tracked"] == expected["num_batches_tracked"] == 4
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(found[name], expected[name], rtol=RELATIVE, atol=1e-6)
