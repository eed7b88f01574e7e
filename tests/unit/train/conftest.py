# transformers' configs import accelerate where it is installed, and that torch_xla, which sets environment variables:
# here, before the first test, and not in one of them.
import pytest
from transformers import LlamaConfig  # noqa: F401

from torchacc.train.file import TrainFile
from torchacc.train.stage import StageRequest, resolve_stage

FILE = """
output_dir: {out}
training_stages:
  one:
    model_config: model_config_small
    training: {{max_steps: 20, batch_size: 3, gradient_accumulation_steps: 2{training}}}
    distributed: {{engine: native, devices: 2{distributed}}}
{stage}
  two: {{init_from: one, model_config: model_config_small, distributed: {{engine: native}}}}
distributed_examples:
  auto: {{devices: 2}}
  auto_xla: {{devices: 2, engine: xla}}
  offload: {{devices: 2, fsdp: {{cpu_offload: true}}}}
  offload_xla: {{devices: 2, engine: xla, fsdp: {{cpu_offload: true}}}}
  batchnorm: {{devices: 2, sync_batchnorm: true}}
  preset: {{strategy: ddp, num_nodes: 2, devices: 4, engine: native}}
model_config_small: {{{model}}}
model_config_1.7B: {{model_type: llama, num_hidden_layers: 2}}
{top}
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that resolves stage `one`, with more in its sections, and what a command asks for."""
    monkeypatch.chdir(tmp_path)

    def make(stage="", launched=None, stage_name=None, model="model_type: gpt2, n_layer: 2", **more):
        sections = {name: more.pop(name, "") for name in ("training", "distributed", "top")}
        text = FILE.format(
            out=tmp_path / "out",
            stage="\n".join(f"    {line}" for line in stage.splitlines()),
            model=model,
            training=f", {sections['training']}" if sections["training"] else "",
            distributed=f", {sections['distributed']}" if sections["distributed"] else "",
            top=sections["top"],
        )
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        request = StageRequest(stage=stage_name, model=more.pop("chosen_model", None), **more)
        return resolve_stage(TrainFile.read(path), request, launched)

    return make
