"""Folders of `torch.distributed.checkpoint`, written by PyTorch and read by it, against checkpoints of torchacc."""

import os
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import torchacc
from tests import forkrun
from tests.unit.checkpoint.other_formats.made_dcp_folders import altered, write
from torchacc.checkpoint import load, save, verify
from torchacc.checkpoint.dcp import export_dcp, import_dcp
from torchacc.checkpoint.other_formats.dcp_files import DcpFolder
from torchacc.checkpoint.own_format import json_codec
from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder
from torchacc.errors import CheckpointError

FSDP2_PROGRAM = Path(__file__).with_name("dcp_fsdp2_program.py")
SPMD_PROGRAM = Path(__file__).with_name("dcp_spmd_program.py")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
both_forms = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])


class Net(nn.Module):
    """A tied parameter, a frozen one, and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h).tanh()
        return self.head(self.norm(h))


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def adamw(model):
    norms = [p for name, p in model.named_parameters() if name.startswith("norm")]
    others = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("norm")]
    return torch.optim.AdamW([{"params": norms, "weight_decay": 0.0, "lr": 0.05}, {"params": others}], lr=0.02)


def train(model, optimizer, steps, seed=1):
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 7, (6,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accelerated(seed=0):
    config = torchacc.Config()
    config.backend = "native"
    return torchacc.accelerate(make(seed), config=config)


def tensors(path, stem="model"):
    return {
        name: tensor for file in sorted(path.glob(f"{stem}*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.fixture
def saved(tmp_path):
    """A torchacc checkpoint, and the losses of three more steps."""
    model = accelerated()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    save(tmp_path / "saved", model=model, optimizer=optimizer)
    return tmp_path / "saved", train(model, optimizer, 3, seed=2)


@both_forms
def test_plain_pytorch_goes_on_from_an_export(saved, tmp_path, flat):
    path, losses = saved
    export_dcp(path, tmp_path / "dcp")
    model = make(seed=9)
    optimizer = adamw(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.02]
    assert train(model, optimizer, 3, seed=2) == losses


def test_an_export_unpacks_to_what_torch_save_would_hold(saved, tmp_path):
    path, _ = saved
    export_dcp(path, tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth", weights_only=True)
    make().load_state_dict(whole["model"])
    assert torch.equal(whole["model"]["head.weight"], tensors(path)["embed.weight"])
    assert whole["optim"]["param_groups"][0]["params"] == ["norm.weight", "norm.bias"]


def plain_run(tmp_path, flat=None, wrap=None):
    """Train without torchacc, save as PyTorch's users do, and return the losses of three more steps."""
    model = make()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    weights, state = model.state_dict(), optimizer.state_dict()
    if flat is not None:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return train(model, optimizer, 3, seed=2)


def goes_on(path):
    model = accelerated(seed=9)
    optimizer = adamw(model)
    load(path, model=model, optimizer=optimizer)
    return train(model, optimizer, 3, seed=2)


@both_forms
def test_torchacc_goes_on_from_an_import(tmp_path, flat):
    losses = plain_run(tmp_path, flat)
    import_dcp(tmp_path / "dcp", tmp_path / "saved", optimizer_class="AdamW")
    verify(tmp_path / "saved")
    assert goes_on(tmp_path / "saved") == losses


def test_numbered_state_takes_the_names_that_are_given(tmp_path):
    losses = plain_run(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"dcp: its optimizer numbers its 6 parameters, in 2 groups.*parameter_na"
    ):
        import_dcp(tmp_path / "dcp", tmp_path / "saved")
    names = [name for name, parameter in make().named_parameters() if parameter.requires_grad]
    names = sorted(names, key=lambda name: not name.startswith("norm"))
    import_dcp(tmp_path / "dcp", tmp_path / "saved", parameter_names=names)
    assert goes_on(tmp_path / "saved") == losses


def test_what_was_exported_comes_back_as_it_was(saved, tmp_path):
    path, losses = saved
    export_dcp(path, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "again", max_shard_size=100)
    for stem in ("model", "optimizer"):
        before, after = tensors(path, stem), tensors(tmp_path / "again", stem)
        if stem == "model":
            assert torch.equal(after.pop("head.weight"), before["embed.weight"])
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert goes_on(tmp_path / "again") == losses


def numbered_save(model, path, names=lambda name: name):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    weights = {names(name): tensor for name, tensor in model.state_dict().items()}
    dcp.save({"model": weights, "optim": optimizer.state_dict()}, checkpoint_id=path, no_dist=True)
    return optimizer


def test_numbers_become_names_where_the_shapes_allow_one_way_only(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(3, 5, bias=False))
    model[3].weight = model[0].weight  # saved under both names
    optimizer = numbered_save(model, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    found = tensors(tmp_path / "saved", "optimizer")
    expected = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_numbers_are_refused_where_a_buffer_might_be_meant(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    numbered_save(model, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="parameter_names="):
        import_dcp(tmp_path / "dcp", tmp_path / "saved")
    with pytest.raises(CheckpointError, match="has 4 parameters, and parameter_names names 1"):
        import_dcp(tmp_path / "dcp", tmp_path / "saved", parameter_names=["0.weight"])
    import_dcp(tmp_path / "dcp", tmp_path / "saved", parameter_names=[name for name, _ in model.named_parameters()])


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"_orig_module.{name}".replace("1.", "1._orig_module."),
        lambda name: f"_orig_mod._fsdp_wrapped_module.{name}",
        lambda name: name.replace("1.", "1._checkpoint_wrapped_module."),
    ],
    ids=["xla-fsdpv2", "compiled-fsdp1", "recomputed"],
)
def test_what_wrappers_add_to_names_is_left_out(tmp_path, rename):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    numbered_save(model, tmp_path / "dcp", rename)
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    assert tensors(tmp_path / "saved").keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "nest",
    [
        lambda weights, state: {"app": {"model": weights, "optim": state}},
        lambda weights, state: {"model": weights, "optimizer": state, "lr_scheduler": {"last_epoch": 3}},
        lambda weights, state: {**weights, "optimizer": state},
    ],
    ids=["app-state", "optimizer", "model-at-the-top"],
)
@both_forms
def test_the_usual_nestings_are_found(tmp_path, nest, flat):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save(nest(weights, state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    assert tensors(tmp_path / "saved").keys() == weights.keys()
    names = {name for name, _ in model.named_parameters()}
    assert tensors(tmp_path / "saved", "optimizer").keys() <= {f"{name}/momentum_buffer" for name in names}


def test_a_bare_model_whose_names_begin_with_model(tmp_path):
    weights = {"model.embed.weight": torch.ones(2, 2), "lm_head.weight": torch.zeros(2, 2)}
    dcp.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    assert tensors(tmp_path / "saved").keys() == weights.keys()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # notes no paths
    dcp.save(weights, checkpoint_id=tmp_path / "unflattened", no_dist=True, planner=planner)
    import_dcp(tmp_path / "unflattened", tmp_path / "again")
    assert tensors(tmp_path / "again").keys() == weights.keys()


def test_a_tied_head_of_hugging_face_is_stored_once(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=16))
    model.save_pretrained(tmp_path / "hub")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "saved", config_from=tmp_path / "hub")
    assert tensors(tmp_path / "saved").keys() == tensors(tmp_path / "hub").keys()
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    export_dcp(tmp_path / "saved", tmp_path / "out")
    fresh = GPT2LMHeadModel(model.config).state_dict()
    dcp.load({"model": fresh}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(fresh[name], tensor) for name, tensor in model.state_dict().items())


def test_other_strides_and_dtypes_survive(tmp_path):
    weights = {
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).t(),
        "half": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    found = tensors(tmp_path / "saved")
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in weights.items()
    )
    export_dcp(tmp_path / "saved", tmp_path / "out")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_a_tensor_cut_along_any_dim_is_put_together(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    write(tmp_path / "dcp", {"model": {"w": whole}})

    def cut(metadata):
        """Lay the tensor out as four parts, each of which is a file."""
        key, entry = "model.w", metadata.state_dict_metadata["model.w"]
        entry.chunks = [ChunkStorageMetadata(torch.Size((r, c)), torch.Size((2, 3))) for c in (3, 0) for r in (0, 2)]
        metadata.storage_data.clear()
        for number, chunk in enumerate(entry.chunks):
            row, column = chunk.offsets
            file = tmp_path / "dcp" / f"part_{number}"
            torch.save(whole[row : row + 2, column : column + 3].contiguous(), file)
            info = _StorageInfo(file.name, 0, file.stat().st_size)
            metadata.storage_data[MetadataIndex(key, chunk.offsets)] = info

    altered(tmp_path / "dcp", cut)
    assert torch.equal(DcpFolder(tmp_path / "dcp").read("model.w"), whole)
    loaded = {"model": {"w": torch.zeros(4, 6)}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(loaded["model"]["w"], whole)


def test_groups_in_one_entry_are_read_too(tmp_path):
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0]}]  # as PyTorch up to 2.3 wrote them
    state = {"model.w": torch.ones(2), "optim.state.0.exp_avg": torch.zeros(2), "optim.param_groups": groups}
    write(tmp_path / "dcp", state, dcp.DefaultSavePlanner(flatten_state_dict=False))
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    with CheckpointFolder(tmp_path / "saved") as saved:
        groups = json_codec.decode(saved.read_json("optimizer.json"), {})["groups"]
        assert groups == [{"lr": 0.5, "betas": (0.9, 0.99), "parameters": ["w"]}]
        assert list(saved.optimizer) == ["w/exp_avg"]


def test_what_is_there_is_not_overwritten(saved, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="is there already"):
        export_dcp(saved[0], tmp_path)


def test_an_altered_checkpoint_is_not_exported(saved, tmp_path):
    path = saved[0] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is not as it was written")):
        export_dcp(saved[0], tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def fsdp2(task, folder):
    done = forkrun.run(FSDP2_PROGRAM, task, folder, num_ranks=2, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in done.stdout.partition("LOSSES ")[2].split()]


@pytest.mark.slow
def test_fsdp2_and_torchacc_go_on_from_each_other(tmp_path):
    program = runpy.run_path(str(FSDP2_PROGRAM))
    losses = fsdp2("save", tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    config = torchacc.Config()
    config.backend = "native"
    model = torchacc.accelerate(program["make"](seed=9), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(tmp_path / "saved", model=model, optimizer=optimizer)
    assert program["train"](model, optimizer, 3, seed=2) == pytest.approx(losses, rel=1e-5)
    export_dcp(tmp_path / "saved", tmp_path / "out")
    assert fsdp2("load", tmp_path / "out") == losses


@pytest.mark.slow
@pytest.mark.xla
def test_what_torch_xla_saves_under_spmd_is_imported_whole(tmp_path):
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    files = (tmp_path / "dcp", tmp_path / "whole.pth")
    done = forkrun.run(SPMD_PROGRAM, *files, imports=["torch_xla"], env=environ, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    import_dcp(tmp_path / "dcp", tmp_path / "saved")
    for stem, expected in torch.load(tmp_path / "whole.pth", weights_only=True).items():
        found = tensors(tmp_path / "saved", stem)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
