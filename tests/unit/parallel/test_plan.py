import pytest
import torch
from torch import nn

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import make_plan
from torchacc.parallel.units import infer_layer_classes, select_units

ALONE = Mesh((("dp", 1), ("fsdp", 1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.value = nn.Linear(4, 4)

    def forward(self, x):
        return self.query(x) + self.value(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.attention(x))


class Net(nn.Module):
    def __init__(self, num_blocks=2, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plan(model, **fsdp):
    return make_plan(model, Config(dist={"fsdp": fsdp}), ALONE)


def units(model, **fsdp):
    """Return the units by name, the model itself left out, with the names of their parameters."""
    return {unit.name: [p.name for p in unit.parameters] for unit in plan(model, **fsdp).units if unit.name}


def root(model, **fsdp):
    return [parameter.name for parameter in plan(model, **fsdp).units[-1].parameters]


# How units are chosen


def test_units_by_class():
    assert [*units(Net(), wrap_layer_cls={"Attention"})] == ["blocks.0.attention", "blocks.1.attention"]
    assert [*units(Net(), wrap_layer_cls=Attention)] == ["blocks.0.attention", "blocks.1.attention"]


def test_a_parameter_belongs_to_the_innermost_unit():
    found = units(Net(1), wrap_layer_cls={"Block", "Attention"})
    assert found["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert found["blocks.0.attention"] == [
        f"blocks.0.attention.{name}" for name in ("query.weight", "query.bias", "value.weight", "value.bias")
    ]
    assert root(Net(1), wrap_layer_cls={"Block", "Attention"}) == ["embedding.weight", "head.weight"]


def test_every_parameter_is_in_one_unit():
    model = Net()
    for fsdp in ({}, {"wrap_layer_cls": {"Linear", "Block"}}, {"min_num_params": 20}, {"wrap_modules": "blocks.*"}):
        names = [parameter.name for parameter in plan(model, **fsdp).parameters]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_units_come_in_the_models_order_with_the_model_last():
    names = [unit.name for unit in plan(Net(11), wrap_layer_cls={"Block"}).units]
    assert names == [*(f"blocks.{index}" for index in range(11)), ""]


def test_a_unit_is_not_taken_for_one_whose_name_it_begins():
    found = units(Net(11), wrap_layer_cls={"Block"})
    assert all(name.startswith("blocks.1.") for name in found["blocks.1"])


def test_a_misspelt_class_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"'Blok'.*Net.*did you mean 'Block'\?.*Attention, Block, Embedding"):
        plan(Net(), wrap_layer_cls={"Blok"})


def test_a_class_unlike_any_is_refused_with_all_of_them():
    said = r"its repeated layers are Block\. Its classes are Attention, .*Linear, ModuleList"
    with pytest.raises(ConfigError, match=said):
        plan(Net(), wrap_layer_cls={"Zebra", "Block"})


def test_a_modules_name_in_the_place_of_a_class_names_the_other_option():
    with pytest.raises(ConfigError, match=r"'blocks\.0'.*wrap_modules = \{'blocks\.0'\} takes names of modules"):
        plan(Net(), wrap_layer_cls={"blocks.0"})


def test_units_by_pattern_stay_at_their_depth():
    assert [*units(Net(), wrap_modules="blocks.*")] == ["blocks.0", "blocks.1"]
    assert [*units(Net(), wrap_modules={"blocks.*.attention", "head"})] == [
        "blocks.0.attention",
        "blocks.1.attention",
        "head",
    ]
    assert [*units(Net(), wrap_modules="blocks.[1-9]")] == ["blocks.1"]


def test_a_pattern_that_fits_nothing_is_refused_with_the_modules():
    with pytest.raises(ConfigError, match=r"'layers\.\*', which fits no module of Net: its modules are emb"):
        plan(Net(), wrap_modules={"layers.*", "head"})


def test_a_pattern_that_fits_only_deeper_modules_is_refused():
    with pytest.raises(ConfigError, match=r"'\*norm'.*fits no module"):
        plan(Net(), wrap_modules="*norm")


def test_units_by_function():
    seen = []

    def rule(name, module):
        seen.append(name)
        return isinstance(module, nn.Linear) and name.endswith("value")

    assert [*units(Net(), wrap_modules=rule)] == ["blocks.0.attention.value", "blocks.1.attention.value"]
    assert "" not in seen


def test_units_by_size_innermost_first():
    assert [*units(Net(), min_num_params=40)] == ["blocks.0.attention", "blocks.1.attention", "head"]
    assert [*units(Net(), min_num_params=48)] == ["blocks.0", "blocks.1"]
    assert [*units(Net(), min_num_params=20)] == [
        f"blocks.{index}.attention.{name}" for index in (0, 1) for name in ("query", "value")
    ] + ["head"]


def test_an_embedding_is_no_unit_by_size_and_the_model_is_not_named():
    assert "embedding" not in units(Net(), min_num_params=1)
    assert units(Net(), min_num_params=10**6) == {}


def test_what_a_unit_by_size_leaves_over_counts_for_the_one_around_it():
    # The norm's 8 are too few alone, and with an attention of 40 that is a unit itself, still are.
    assert [*units(Net(1), min_num_params=9)] == ["blocks.0.attention.query", "blocks.0.attention.value", "head"]
    assert [*units(Net(1), min_num_params=41)] == ["blocks.0"]


@pytest.mark.parametrize("fsdp", [{"wrap_layer_cls": {"ModuleList"}}, {"wrap_modules": "blocks"}])
def test_a_container_cannot_be_a_unit(fsdp):
    with pytest.raises(ConfigError, match=r"'blocks' \(ModuleList\).*no forward.*'blocks\.\*'"):
        plan(Net(), **fsdp)


def test_a_container_is_passed_over_by_size():
    assert "blocks" not in units(Net(), min_num_params=60)


# What is inferred


def test_the_repeated_layer_of_a_list_is_inferred():
    assert infer_layer_classes(Net()) == {"Block"}
    assert [*units(Net())] == ["blocks.0", "blocks.1"]


def test_what_the_model_declares_goes_before():
    model = Net()
    model._no_split_modules = ["Attention", "NotHere"]
    assert infer_layer_classes(model) == {"Attention"}


def test_a_declaration_deeper_in_the_model_counts_too():
    outer = nn.Sequential(Net(), nn.Linear(10, 2))
    outer[0]._no_split_modules = {"Attention"}
    assert infer_layer_classes(outer) == {"Attention"}


def test_a_declaration_that_names_nothing_here_is_passed_over():
    model = Net()
    model._no_split_modules = ["T5Block"]
    assert infer_layer_classes(model) == {"Block"}


def test_layers_of_lists_in_a_list_are_repeated_layers_and_the_lists_are_not():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()])])
    assert infer_layer_classes(model) == {"Block"}
    model.blocks = nn.ModuleList([nn.ModuleDict({"layer": Block()}), nn.ModuleDict({"layer": Block()})])
    assert infer_layer_classes(model) == {"Block"}


def test_a_single_layer_and_bare_layers_are_not_repeated_layers():
    assert infer_layer_classes(Net(1)) == set()
    assert infer_layer_classes(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == set()
    assert select_units(Net(1), Config().dist.fsdp) == []


# What is tied, shared and frozen


def test_a_tied_parameter_is_planned_once():
    found = plan(Net(tied=True))
    assert found.tied == (("embedding.weight", "head.weight"),)
    assert found.numel == sum(parameter.numel() for parameter in Net(tied=True).parameters())
    (tied,) = [parameter for parameter in found.parameters if parameter.aliases]
    assert tied.names == ("embedding.weight", "head.weight")
    assert tied.shape == (10, 4)
    assert tied.numel == 40


def test_what_is_tied_across_units_is_hoisted_to_the_model():
    fsdp = {"wrap_layer_cls": {"Block", "Embedding"}}
    assert units(Net(tied=False), **fsdp)["embedding"] == ["embedding.weight"]
    assert units(Net(tied=True), **fsdp)["embedding"] == []
    assert root(Net(tied=True), **fsdp) == ["embedding.weight"]


def test_what_is_tied_inside_of_one_unit_stays_there():
    model = Net(2)
    model.blocks[0].attention.value.weight = model.blocks[0].attention.query.weight
    found = units(model, wrap_layer_cls={"Block", "Linear"})
    assert "blocks.0.attention.query.weight" in found["blocks.0"]
    assert found["blocks.0.attention.query"] == ["blocks.0.attention.query.bias"]


def test_a_shared_module_is_one_unit_whose_parameters_have_two_names():
    model = Net(1)
    model.blocks.append(model.blocks[0])
    found = plan(model, wrap_layer_cls={"Block"})
    # Under its second name it lies outside of the unit, so that the whole model's gather is the one that is right.
    assert [unit.name for unit in found.units] == ["blocks.0", ""]
    assert ("blocks.0.norm.weight", "blocks.1.norm.weight") in found.tied
    assert found.numel == sum(parameter.numel() for parameter in model.parameters())


def test_frozen_parameters_are_noted():
    model = Net()
    model.blocks[0].requires_grad_(False)
    found = plan(model)
    assert len(found.frozen) == 6
    assert all(name.startswith("blocks.0.") for name in found.frozen)
    assert {p.trainable for p in found.units[0].parameters} == {False}


# The plan as a whole


def test_it_prints():
    model = Net(1, tied=True)
    model.blocks[0].norm.requires_grad_(False)
    fsdp = {"wrap_layer_cls": {"Block"}, "cpu_offload": True, "forward_prefetch": True, "backward_prefetch": "NONE"}
    config = Config(compute={"bf16": True}, memory={"offload_activations": True}, dist={"fsdp": fsdp})
    assert str(make_plan(model, config, ALONE)).splitlines() == [
        "dp 1 x fsdp 1, compute in bfloat16, 88 parameters",
        "  masters in float32, gradients summed in float32",
        "  shards on the host",
        "  activations on the host",
        "  gathers ahead in forward",
        "  gathers nothing ahead in backward",
        "  blocks.0  Block  48",
        "  (model)   Net  40",
        "  tied: embedding.weight = head.weight",
        "  frozen: 2 parameters",
    ]


@pytest.mark.parametrize(
    ("compute", "dtypes"),
    [
        ({}, ("float32", "float32", "float32")),
        ({"bf16": True}, ("bfloat16", "float32", "float32")),
        ({"fp16": True}, ("float16", "float32", "float32")),
        ({"bf16": True, "master_dtype": "bfloat16"}, ("bfloat16", "bfloat16", "float32")),
        ({"reduce_dtype": "bfloat16"}, ("float32", "float32", "bfloat16")),
    ],
)
def test_the_config_decides_on_dtypes(compute, dtypes):
    found = make_plan(Net(), Config(compute=compute), ALONE)
    assert (found.compute_dtype, found.master_dtype, found.reduce_dtype) == dtypes


def test_a_unit_gathers_the_next_one_ahead_and_the_model_the_first():
    assert plan(Net(3), forward_prefetch=True).prefetched_in_forward == {
        "": "blocks.0",
        "blocks.0": "blocks.1",
        "blocks.1": "blocks.2",
    }
    assert plan(Net(3)).prefetched_in_forward == {}


def test_a_unit_inside_of_another_is_gathered_after_it():
    found = plan(Net(), forward_prefetch=True, wrap_modules={"blocks.*", "blocks.*.attention"}).prefetched_in_forward
    assert list(found.values()) == ["blocks.0", "blocks.0.attention", "blocks.1", "blocks.1.attention"]


def test_what_has_no_parameters_of_its_own_is_not_gathered_ahead():
    model = nn.Sequential(Block(), Block())
    assert plan(model, forward_prefetch=True).prefetched_in_forward == {"0": "1"}


def test_the_config_decides_on_flattening():
    assert not plan(Net()).flatten
    assert plan(Net(), flatten_parameters=True).flatten


def test_the_model_is_only_read():
    model = Net()
    before = dict(model.named_parameters())
    plan(model, wrap_layer_cls={"Block"})
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match=r"ReLU has no parameters"):
        plan(nn.ReLU())


def test_a_container_is_refused_as_model():
    with pytest.raises(ConfigError, match=r"ModuleList has no forward\(\) of its own"):
        plan(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_forward_set_on_the_object_is_one():
    model = nn.ModuleList([nn.Linear(2, 2)])
    model.forward = lambda x: model[0](x)
    assert plan(model).numel == 6


@pytest.mark.parametrize("thing", [None, {"model": 1}, [nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused(thing):
    with pytest.raises(ConfigError, match=rf"takes a torch.nn.Module, and got {type(thing).__name__}"):
        plan(thing)


def test_the_meta_device_makes_no_difference():
    with torch.device("meta"):
        model = Net()
    assert plan(model) == plan(Net())


def test_gpt2s_tied_weight_is_hoisted_out_of_the_embedding():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 31, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    fsdp = {"wrap_layer_cls": {"GPT2Block", "Embedding"}}
    found = units(model, **fsdp)
    assert found["transformer.wte"] == []
    assert found["transformer.wpe"] == ["transformer.wpe.weight"]
    assert "transformer.wte.weight" in root(model, **fsdp)
    assert plan(model, **fsdp).tied == (("transformer.wte.weight", "lm_head.weight"),)
    assert [*units(model)] == ["transformer.h.0", "transformer.h.1"]


def test_a_function_that_chooses_nothing_is_refused():
    with pytest.raises(ConfigError, match="chose no module"):
        plan(Net(), wrap_modules=lambda name, module: False)


# The head, where the loss is computed in chunks


class Language(Net):
    def get_output_embeddings(self):
        return self.head


def chunked(**sections):
    return make_plan(Language(), Config(compute={"chunked_loss": True}, **sections), ALONE)


def test_the_head_is_no_unit_where_the_loss_is_computed_in_chunks(caplog):
    caplog.set_level("INFO", "torchacc")
    assert "head" in units(Language(), min_num_params=40)
    found = chunked(dist={"fsdp": {"min_num_params": 40}}, memory={"gc": True})
    assert [unit.name for unit in found.units] == ["blocks.0.attention", "blocks.1.attention", ""]
    assert "head.weight" in [parameter.name for parameter in found.units[-1].parameters]
    assert found.recomputed == ("blocks.0.attention", "blocks.1.attention")
    assert found.left_to_model == ("head",)
    assert "computes with the head: head" in str(found)
    assert not caplog.records, "a plan is made several times, and accelerate() logs of it once"


def test_a_loss_in_chunks_needs_a_head_that_is_computed_once():
    with pytest.raises(ConfigError, match="memory.gc recomputes 'head' in backward"):
        chunked(memory={"gc": True, "gc_cls": ["Linear"]})
    with pytest.raises(ConfigError, match="Net has no module that computes logits"):
        make_plan(Net(), Config(compute={"chunked_loss": True}), ALONE)


# What is recomputed


def recomputed(model, wrap=None, **memory):
    return make_plan(model, Config(memory={"gc": True, **memory}, dist={"fsdp": wrap or {}}), ALONE).recomputed


def test_nothing_is_computed_again_unless_asked():
    assert plan(Net()).recomputed == ()


def test_units_are_computed_again():
    assert recomputed(Net()) == ("blocks.0", "blocks.1")
    assert recomputed(Net(), wrap={"wrap_layer_cls": "Attention"}) == ("blocks.0.attention", "blocks.1.attention")


def test_classes_are_computed_again_whatever_the_units_are():
    assert recomputed(Net(1), gc_cls={"Attention", "LayerNorm"}) == ("blocks.0.attention", "blocks.0.norm")
    assert recomputed(Net(1), gc_cls=Attention) == ("blocks.0.attention",)


def test_what_lies_inside_of_another_is_left_to_it():
    assert recomputed(Net(1), gc_cls={"Block", "Attention"}) == ("blocks.0",)
    assert recomputed(Net(1), wrap={"wrap_layer_cls": {"Block", "Attention"}}) == ("blocks.0",)


@pytest.mark.parametrize(
    ("memory", "chosen"),
    [({"gc_every": 2}, [0, 2, 4]), ({"gc_cnt": 3}, [0, 1, 2]), ({"gc_every": 2, "gc_cnt": 2}, [0, 2])],
)
def test_some_of_the_units_are_computed_again(memory, chosen):
    assert recomputed(Net(5), **memory) == tuple(f"blocks.{index}" for index in chosen)


def test_a_class_that_is_not_there_is_refused_with_what_is():
    with pytest.raises(ConfigError, match=r"memory.gc_cls names 'Blok'.* did you mean 'Block'\?"):
        recomputed(Net(), gc_cls="Blok")
    with pytest.raises(ConfigError, match="'blocks' .* has no forward"):
        recomputed(Net(), gc_cls="ModuleList")


def test_a_model_without_units_has_to_name_what_to_compute_again():
    with pytest.raises(ConfigError, match=r"Linear has no units: name the classes .* config.memory.gc_cls"):
        recomputed(nn.Linear(2, 2))


def test_the_switch_of_transformers_is_the_same():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 31, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    model.activation_checkpointing_enable(every_n_layers=2)
    assert plan(model).recomputed == ("transformer.h.0", "transformer.h.2")
    assert recomputed(model, gc_cls="GPT2MLP", gc_cnt=1) == ("transformer.h.0.mlp",)


def test_what_is_computed_again_is_printed():
    plan = make_plan(Net(), Config(memory={"gc": True, "gc_cnt": 1}), ALONE)
    assert str(plan).endswith("recomputed in backward: blocks.0")
