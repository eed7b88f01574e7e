"""What the Hugging Face Trainer's arguments become, and how an evaluation is filled up; no device, no processes."""

import copy
import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("accelerate")

import transformers
from transformers.trainer_pt_utils import AcceleratorConfig

import torchacc.integrations.hf
from torchacc import Config, ConfigError, DataError
from torchacc.integrations.hf import Trainer, TrainingArguments, arguments_for, trainer_for
from torchacc.integrations.hf.accelerator import AcceleratorAdapter
from torchacc.integrations.hf.data import EvalLoader, masked, num_own
from torchacc.integrations.hf.known_trainers import check_losses, refuse_uncovered
from torchacc.integrations.hf.loop import Loop
from torchacc.integrations.hf.losses import MeanOf
from torchacc.integrations.hf.replaced_globals import method_of, with_globals_replaced
from torchacc.integrations.hf.trainer import ShardedTrainer
from torchacc.integrations.hf.training_arguments import adopt


def arguments(tmp_path, **changed):
    return TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, **changed)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("fsdp", True, "use torchacc_config.dist.fsdp"),
        ("fp16", True, "use bf16=True"),
        ("bf16_full_eval", True, "use bf16=True"),
        ("torch_compile", True, "leave it out"),
        ("auto_find_batch_size", True, "set per_device_train_batch_size"),
        ("save_on_each_node", True, "leave it out"),
        ("train_sampling_strategy", "batch_rebalance", "'group_by_length'"),
        ("accelerator_config", AcceleratorConfig(split_batches=True), "torchacc shares the batches out itself"),
    ],
)
def test_an_argument_that_cannot_be_carried_out_is_refused(tmp_path, name, value, instead):
    args = arguments(tmp_path)
    setattr(args, name, value)  # to pass some of them would change the environment
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}=.*{instead}"):
        adopt(args, Config())


@pytest.mark.xla
def test_one_program_for_several_hosts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = Config.from_dict({"backend": "xla", "dist": {"fsdp": {"use_spmd": True}}})
    with pytest.raises(ConfigError, match="in a job of 2 processes: the Trainer does not count the rows of several"):
        Trainer(model=torch.nn.Linear(2, 2), args=arguments(tmp_path), torchacc_config=config)


@pytest.mark.parametrize("name", ["label_smoothing_factor", "compute_loss_func"])
def test_a_loss_of_logits_that_one_stage_alone_has_is_refused(tmp_path, name):
    smoothing, function = (0.1, None) if name == "label_smoothing_factor" else (0.0, lambda outputs, labels: outputs)
    args = arguments(tmp_path, label_smoothing_factor=smoothing)
    config = Config.from_dict({"backend": "native", "dist": {"pp": {"size": 2}}})
    with pytest.raises(ConfigError, match=rf"{name} with config\.dist\.pp\.size = 2.* Leave {name} out"):
        Trainer(model=torch.nn.Linear(2, 2), args=args, torchacc_config=config, compute_loss_func=function)


def test_what_is_no_config_is_refused(tmp_path):
    for options, instead in (
        ({"torchacc_config": {"dist": {}}}, r"torchacc\.Config\.from_dict\(torchacc_config\)"),
        ({"torchacc_config": "run.yaml"}, r"torchacc\.Config\.from_yaml\('run\.yaml'\)"),
        ({"config": Config()}, "write torchacc_config="),
    ):
        with pytest.raises(ConfigError, match=instead):
            Trainer(args=arguments(tmp_path), **options)


def test_arguments_become_options_and_stay_as_they_are(tmp_path):
    args = arguments(
        tmp_path, bf16=True, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2}
    )
    config = Config()
    adopted, resolved = adopt(args, config)
    assert resolved.compute.bf16
    assert (resolved.memory.gc, resolved.memory.gc_every) == (True, 2)
    assert not adopted.activation_checkpointing
    assert args.activation_checkpointing
    assert config == Config()


def test_kwargs_of_recompute_that_torchacc_does_not_take_are_refused(tmp_path):
    args = arguments(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})
    with pytest.raises(ConfigError, match="'offload'"):
        adopt(args, Config())


def test_options_that_the_trainer_cannot_train_with_are_refused(tmp_path):
    config = Config()
    config.compute.fp16 = True
    with pytest.raises(ConfigError, match="loss scaler"):
        adopt(arguments(tmp_path), config)
    config = Config()
    config.dist.fsdp.flatten_parameters = True
    with pytest.raises(ConfigError, match="by name which parameters decay"):
        adopt(arguments(tmp_path), config)


def test_arguments_of_transformers_own_are_refused():
    with pytest.raises(ConfigError, match="torchacc.integrations.hf.TrainingArguments"):
        adopt(SimpleNamespace(), Config())


def test_making_arguments_starts_no_device(tmp_path):
    from accelerate.state import PartialState

    args = arguments(tmp_path)
    assert (args.device, args.world_size, args.process_index) == (torch.device("cpu"), 1, 0)
    assert PartialState._shared_state == {}


@pytest.mark.parametrize(
    ("attribute", "reason"), [("hf_device_map", "open it without device_map"), ("is_quantized", "quantized")]
)
def test_a_model_that_is_placed_or_quantized_is_refused(tmp_path, attribute, reason):
    model = torch.nn.Linear(2, 2)
    setattr(model, attribute, True)
    with pytest.raises(ConfigError, match=reason):
        Trainer(model, arguments(tmp_path))


def test_without_accelerate_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"pip install 'torchacc\[hf\]'"):
        importlib.reload(torchacc.integrations.hf)


@pytest.mark.parametrize(("num_filling", "shards", "expected"), [(0, 1, 2), (1, 1, 1), (3, 1, 0), (3, 0, 1)])
def test_rows_that_complete_a_batch_have_labels_that_no_loss_counts(num_filling, shards, expected):
    engine = engine_of(range(shards, shards + 1))
    batch = {"labels": torch.tensor([[5, 6], [7, 8]]), "input_ids": torch.ones(2, 2)}
    found = masked(batch, engine, num_filling, 2)
    assert num_own(engine, 2, num_filling) == expected
    assert found["labels"].tolist() == [[5, 6], [7, 8]][:expected] + [[-100, -100]] * (2 - expected)
    assert batch["labels"].tolist() == [[5, 6], [7, 8]]


def test_rows_of_all_devices_in_one_process_are_masked_at_the_end():
    found = masked({"labels": torch.arange(4)}, engine_of(range(2)), 3, 4)
    assert found["labels"].tolist() == [0, -100, -100, -100]


def test_labels_that_are_numbers_stay_as_they_are():
    assert masked({"labels": torch.tensor([0.5, 0.5])}, engine_of(range(2)), 1, 2)["labels"].tolist() == [0.5, 0.5]


def test_examples_that_are_no_rows_of_their_own_are_not_masked_by_row():
    packed = {"labels": torch.arange(8).view(1, 8)}  # of two examples
    assert masked(packed, engine_of(range(1)), 0, 2) is packed
    with pytest.raises(DataError, match="a batch of 2 has 1 rows.*dataloader_drop_last=True"):
        masked(packed, engine_of(range(1)), 1, 2)


class Own(transformers.Trainer):
    """A user's, with an __init__ of its own."""

    def __init__(self, model, scale, args=None, **kwargs):
        self.scale = scale
        super().__init__(model=model, args=args, **kwargs)


def test_a_trainer_of_ones_own_becomes_one_of_torchaccs(tmp_path):
    kind = trainer_for(Own)
    assert (kind.__name__, issubclass(kind, Own), trainer_for(kind)) == ("Own", True, kind)
    assert trainer_for(Trainer) is Trainer
    with pytest.raises(ConfigError, match="arguments_for"):
        kind(torch.nn.Linear(1, 1), 2.0)
    with pytest.raises(ConfigError, match="which has started a device of its own"):
        kind(torch.nn.Linear(1, 1), 2.0, SimpleNamespace())
    for wrong in (object, Own.__init__, "Own"):
        with pytest.raises(ConfigError, match=r"pass a subclass of transformers\.Trainer"):
            trainer_for(wrong)


@dataclass
class OwnArguments(transformers.TrainingArguments):
    scale: float = 1.0


def test_arguments_of_ones_own_start_no_device_and_can_be_copied_and_saved(tmp_path):
    kind = arguments_for(OwnArguments)
    args = kind(str(tmp_path), scale=2.0, use_cpu=True, report_to="none")
    assert isinstance(args, OwnArguments)
    assert isinstance(args, TrainingArguments)
    torch.save(args, tmp_path / "args.bin")
    for other in (copy.copy(args), torch.load(tmp_path / "args.bin", weights_only=False)):
        assert (type(other).__name__, other.scale, other.output_dir) == ("OwnArguments", 2.0, str(tmp_path))
    other = copy.copy(args)
    other.scale = 3.0
    assert args.scale == 2.0
    with pytest.raises(ConfigError, match=r"pass a subclass of transformers\.TrainingArguments"):
        arguments_for(Own)


def of_trl(name, module, *bases):
    return type(name, bases or (transformers.Trainer,), {"__module__": module})


def test_of_trl_only_the_trainers_that_were_compared_are_taken():
    base = of_trl("_BaseTrainer", "trl.trainer.base_trainer")
    covered = of_trl("SFTTrainer", "trl.trainer.sft_trainer", base)
    for kind in (Own, covered, type("Mine", (covered,), {})):
        refuse_uncovered(kind)
    for kind in (
        of_trl("GRPOTrainer", "trl.trainer.grpo_trainer", base),
        of_trl("GKDTrainer", "trl.experimental.gkd.gkd_trainer", covered),
        of_trl("SFTTrainer", "trl.experimental.other", covered),
        of_trl("_BaseTrainer", "trl.trainer.base_trainer"),
    ):
        with pytest.raises(ConfigError, match=f"{kind.__module__}.{kind.__name__} has not been compared"):
            refuse_uncovered(type("Mine", (kind,), {}))


def test_generating_in_an_evaluation_is_refused_where_ranks_generate_apart(tmp_path):
    args = arguments_for(transformers.Seq2SeqTrainingArguments)(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to="none"
    )
    check_losses(SimpleNamespace(args=args), 1)
    with pytest.raises(ConfigError, match=r"predict_with_generate=True would have.*synced_gpus=True"):
        check_losses(SimpleNamespace(args=args), 2)


def test_the_order_of_the_data_is_of_the_arguments_seed_whatever_a_rank_has_seeded(tmp_path):
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loop = Loop.__new__(Loop)
        loop.args, loop.train_dataset = arguments(tmp_path), list(range(20))
        orders.append(list(loop._get_train_sampler()))
    assert orders[0] == orders[1] != sorted(orders[0])


def test_a_batch_in_which_no_device_has_a_label_weighs_nothing():
    kind = of_trl("SFTTrainer", "trl.trainer.sft_trainer", SimpleNamespace)
    accelerator = SimpleNamespace(gather=lambda count: torch.stack([count, count]))
    trainer = kind(_num_losses=2, accelerator=accelerator, _engine=engine_of(range(1)))
    trainer.compute_loss_func = trainer.label_smoother = None
    batch = {"labels": torch.full((2, 3), -100)}
    inputs, weight = ShardedTrainer._weighed(trainer, batch, MeanOf.LABELS)
    assert (inputs is batch, weight.item()) == (True, 0.0)


def test_what_accelerates_accelerator_has_and_torchaccs_has_not_is_said(capsys):
    adapter = AcceleratorAdapter()
    assert (adapter.is_local_main_process, adapter.local_process_index) == (True, 0)
    adapter.wait_for_everyone()
    adapter.print("once")
    assert capsys.readouterr().out == "once\n"
    assert not hasattr(adapter, "state")
    with pytest.raises(AttributeError, match=r"trainer\.accelerator\.get_state_dict is not there.*full_state_dict"):
        adapter.get_state_dict(None)


def engine_of(data_parallel_ranks):
    return SimpleNamespace(
        mesh=SimpleNamespace(data_parallel_size=2),
        data_parallel_ranks=data_parallel_ranks,
        to_device=lambda batch: batch,
    )


def test_an_evaluation_without_a_length_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([{"labels": 0}])

    with pytest.raises(DataError, match="a Stream does not say how many rows it has"):
        EvalLoader(DataLoader(Stream()), None, None)


def test_a_function_that_does_not_use_a_name_is_not_bound_anew():
    def double(value):
        return abs(value) * 2

    assert with_globals_replaced(double, abs=lambda value: value + 1)(3) == 8
    assert double(3) == 6
    with pytest.raises(ImportError, match="double does not use xm"):
        with_globals_replaced(double, xm=None)


def test_a_method_that_a_version_has_not_is_an_import_error_that_says_so():
    assert method_of(transformers.Trainer, "train") is transformers.Trainer.train
    with pytest.raises(ImportError, match=r"Trainer has no _run_epochs\(\).*pip install 'transformers==5.23"):
        method_of(transformers.Trainer, "_run_epochs")
