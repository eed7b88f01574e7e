"""Every recipe of examples/recipes runs small, and learns."""

import importlib.util
import re
from pathlib import Path

import pytest
import transformers

from tests import forkrun

PROGRAM = Path(__file__).with_name("recipes_program.py")
RECIPES = PROGRAM.parents[2] / "examples" / "recipes"
BY_DEFAULT = ("lora", "pretrain")
NAMES = [path.stem for path in sorted(RECIPES.iterdir()) if path.suffix in (".py", ".yaml")]
CLASSES = {
    "classify": transformers.AutoModelForSequenceClassification,
    "vision": transformers.AutoModelForImageClassification,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in NAMES])
def test_a_recipe_learns_and_its_model_opens(name, tmp_path):
    if name == "lora" and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    env = forkrun.environment(XDG_CACHE_HOME=str(tmp_path))
    ranks = 2 if name == "long_context" else 0  # tokens are shared by several
    done = forkrun.run(PROGRAM, name, num_ranks=ranks, cwd=tmp_path, env=env, merged=True)
    assert done.returncode == 0, done.stdout
    losses = [float(loss) for loss in re.findall(r" loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0], done.stdout
    out = tmp_path / ("runs/pretrain/continued/final" if name == "pretrain" else "out")
    if name == "lora":
        assert (out / "adapter_config.json").is_file()
    else:
        CLASSES.get(name, transformers.AutoModelForCausalLM).from_pretrained(out)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_says_what_it_needs(name):
    (path,) = RECIPES.glob(f"{name}.*")
    lines = path.read_text().splitlines()
    assert len(lines) < 80
    head = "\n".join(lines[:12])
    assert "torchacc plan" in head
    assert "torchrun" in head or "torchacc train" in head
