"""What is handed to the calls by mistake, each answered by what to write: in one process, natively."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchacc
from tests import forkrun
from torchacc.errors import DataError

ORDER = r"torchacc\.accelerate\(model, loader, config, optimizer=optimizer\)"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def make_loader() -> DataLoader:
    return DataLoader(torch.ones(8, 4), 2)


def accelerate(model, loader=None, **options):
    return torchacc.accelerate(model, loader, torchacc.Config(backend="native"), **options)


def test_a_loader_before_the_model_is_refused():
    with pytest.raises(torchacc.ConfigError, match=f"got a DataLoader first, and the model after it.*{ORDER}"):
        torchacc.accelerate(make_loader(), make_model())


@pytest.mark.parametrize("second", [torchacc.Config(), nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], 1.0)])
def test_what_is_no_loader_is_refused_as_one(second):
    with pytest.raises(torchacc.ConfigError, match=f"dataloader = a {type(second).__name__}.*{ORDER}"):
        torchacc.accelerate(make_model(), second)


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"backend": "native"}, r"torchacc\.Config\.from_dict\(config\)"),
        ("run.yaml", r"torchacc\.Config\.from_yaml\('run\.yaml'\)"),
        (torchacc.Config, r"a torchacc\.Config is expected"),
        (make_loader(), ORDER),
    ],
)
def test_what_is_no_config_is_refused(config, instead):
    with pytest.raises(torchacc.ConfigError, match=instead):
        torchacc.accelerate(make_model(), None, config)


def test_what_is_no_optimizer_is_refused():
    model = make_model()
    with pytest.raises(torchacc.ConfigError, match=r"the class AdamW: make one .*AdamW\(model\.parameters\(\), lr=…\)"):
        accelerate(model, optimizer=torch.optim.AdamW)
    with pytest.raises(torchacc.ConfigError, match="optimizer = a list: one torch.optim.Optimizer"):
        accelerate(model, optimizer=[torch.optim.SGD(model.parameters(), 0.1)])


def test_a_tuple_that_is_used_as_a_model_says_what_it_is():
    found = accelerate(make_model(), make_loader())
    expected = r"has returned a tuple: write `model, loader = torchacc\.accelerate\(…\)`"
    for use in (lambda: found.parameters(), lambda: found(torch.ones(2, 4)), lambda: torchacc.accelerate(found)):
        with pytest.raises(torchacc.ConfigError, match=expected):
            use()
    with pytest.raises(torchacc.ConfigError, match="the model that accelerate\\(\\) returned, the first of its tuple"):
        torchacc.full_state_dict(found)


def test_a_tuple_is_a_tuple():
    found = accelerate(make_model(), make_loader())
    model, loader = found
    assert isinstance(found, tuple)
    assert found == (model, loader)
    assert not hasattr(found, "parameters")
    assert type(copy.copy(found)) is type(found)
    assert len(loader) == 4


def test_a_name_that_the_config_has_not_names_the_nearest():
    config = torchacc.Config()
    for read, instead in (
        (lambda: config.distributed.fsdp, "distributed: there is no such option; did you mean 'dist'?"),
        (lambda: config.fsdp, "fsdp: there is no such option; did you mean 'dist.fsdp'?"),
        (lambda: config.bf16, "bf16: there is no such option; did you mean 'compute.bf16'?"),
        (lambda: config.dist.fsdp.sise, "dist.fsdp.sise: there is no such option; did you mean 'size'?"),
        (lambda: config.nonsense, "nonsense: there is no such option; valid names: backend, compute, dataloader"),
    ):
        with pytest.raises(torchacc.ConfigError) as raised:
            read()
        assert str(raised.value).startswith(instead)
    with pytest.raises(torchacc.ConfigError, match="did you mean 'dist'"):
        config.distributed = 1
    assert not hasattr(config, "distributed")
    assert copy.deepcopy(config) == config
    with pytest.raises(torchacc.ConfigError, match=r"Config\.from_dict\(\) takes a dict"):
        torchacc.Config({"backend": "native"})


def test_the_length_of_a_loader_without_one():
    model, loader = accelerate(make_model(), (torch.ones(2, 4) for _ in range(3)))
    with pytest.raises(DataError, match=r"len\(loader\): a generator gives batches, and does not say how many"):
        len(loader)
    assert len(list(loader)) == 3


def test_a_scaler_without_a_model_is_refused():
    for scaler in (torchacc.GradScaler, lambda: torchacc.GradScaler("cpu")):
        with pytest.raises(torchacc.ConfigError, match=r"write torchacc\.GradScaler\(model\)"):
            scaler()


def test_torchs_own_scaler_is_one_natively(caplog):
    config = torchacc.Config(backend="native")
    config.compute.fp16 = True
    model = torchacc.accelerate(make_model(), config=config)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
    scaler.step(optimizer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_moves_to_a_device_that_is_not_there_are_refused_as_others():
    with pytest.raises(torchacc.EngineError, match=r"and stays there: leave out \.to\(\)"):
        accelerate(make_model()).to("cuda")


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_wrapped_model_is_refused_before_and_after(wrap):
    with pytest.raises(torchacc.ConfigError, match="got a model inside of torch"):
        accelerate(wrap(make_model()))
    model = accelerate(make_model())
    with pytest.raises(torchacc.ConfigError, match="around a model of accelerate"):
        wrap(model)


def test_a_model_is_not_compiled_after_accelerate():
    with pytest.raises(torchacc.ConfigError, match=r"model\.compile\(\) of a model of accelerate\(\): leave it out"):
        accelerate(make_model()).compile()


@pytest.mark.xla
def test_a_gru_that_torch_xla_has_replaced_is_refused():
    program = (
        "import torchacc, torch_xla; from torch.nn import GRU, Sequential; config = torchacc.Config(backend='native')"
    )
    done = forkrun.run(
        "-c", f"{program}; torchacc.accelerate(Sequential(GRU(2, 2)), None, config)", imports=["torch_xla"]
    )
    assert "0 is torch_xla's GRU, which computes on XLA devices only" in done.stderr


def test_layers_that_are_compiled_in_place_are_taken():
    model = make_model()
    for layer in model:
        layer.compile(backend="eager")
    assert accelerate(model)(torch.ones(2, 4)).shape == (2, 2)


def test_a_checkpoints_folder_comes_first_and_the_model_by_name(tmp_path):
    model = accelerate(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoint = torchacc.checkpoint
    for call in (
        lambda: checkpoint.save(model, tmp_path / "saved"),
        lambda: checkpoint.save(tmp_path / "saved", model),
        lambda: checkpoint.save(tmp_path / "saved"),
        lambda: checkpoint.save(model, model=tmp_path / "saved"),
        lambda: checkpoint.save(tmp_path / "saved", model=(model, optimizer)),
        lambda: checkpoint.load(model, tmp_path / "saved"),
        lambda: checkpoint.load(tmp_path / "saved", model.state_dict()),
    ):
        with pytest.raises(torchacc.CheckpointError, match=r"write torchacc\.checkpoint\.\w+\(folder, model=model"):
            call()
    with pytest.raises(torchacc.CheckpointError, match=r"write CheckpointManager\(folder, model=model"):
        checkpoint.CheckpointManager(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_managers_folder_is_no_checkpoint_and_says_which_it_holds(tmp_path):
    model = accelerate(make_model())
    for step in (3, 12):
        torchacc.checkpoint.save(tmp_path / f"step-{step:08d}", model=model)
    with pytest.raises(
        torchacc.CheckpointError, match=r"is not a checkpoint, and holds 2, .*step-00000012.*restore\(\)"
    ):
        torchacc.checkpoint.load(tmp_path, model=model)
