"""A script written for the hub, beside a small local `gpt2` and `wikitext`, prints the same on every engine."""

import json
import os
from pathlib import Path

import pytest

from tests import forkrun

SCRIPT = Path(__file__).with_name("hub_script.py")
NUM_ROWS = 36  # 4 devices x 2 rows: four steps and a half

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A working directory with what the hub would give, small."""
    from datasets import Dataset
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("hub")
    text = Path(os.__file__).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if len(line) > 20][:NUM_ROWS]
    GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=500, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ).save_pretrained(folder / "gpt2")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=500, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(folder / "gpt2"))
    (folder / "gpt2" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "wikitext").mkdir()
    Dataset.from_dict({"text": ["", *lines]}).to_parquet(folder / "wikitext" / "train.parquet")
    (folder / "wikitext" / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files: [{split: train, path: train.parquet}]\n---\n"
    )
    return folder


def run(folder, num_ranks, *, backend, use_spmd=False, bf16=False):
    options = json.dumps({"backend": backend, "use_spmd": use_spmd, "bf16": bf16})
    environ = forkrun.environment(HF_HOME=str(folder / "cache"))
    done = forkrun.run(SCRIPT, options, num_ranks=num_ranks, imports=["torch_xla"], env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    facts = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    return sorted(facts, key=lambda fact: fact["rank"])


@pytest.fixture(scope="module")
def native(hub_folder):
    return run(hub_folder, 4, backend="native")


@pytest.fixture(scope="module")
def multiprocess(hub_folder):
    return run(hub_folder, 4, backend="xla")


@pytest.fixture(scope="module")
def spmd(hub_folder):
    return run(hub_folder, 0, backend="xla", use_spmd=True)


def check_shares(facts):
    assert [fact["rank"] for fact in facts] == [0, 1, 2, 3]
    for fact in facts:
        assert fact["dataset"] == NUM_ROWS
        assert fact["rows"] == 10  # a quarter of five global batches: 36 rows, and four of them once more
        assert fact["held"] == pytest.approx(fact["parameters"] / 4, rel=0.01)
        assert fact["losses"] == facts[0]["losses"]


def test_native_ranks_share_the_model_and_the_rows(native):
    check_shares(native)
    assert native[0]["losses"][-1] < native[0]["losses"][0]


@pytest.mark.xla
def test_multiprocess_ranks_share_the_model_and_the_rows(multiprocess):
    check_shares(multiprocess)


@pytest.mark.xla
def test_every_engine_prints_the_same_losses(native, multiprocess, spmd):
    assert multiprocess[0]["losses"] == pytest.approx(native[0]["losses"], rel=1e-5)
    assert spmd[0]["losses"] == pytest.approx(native[0]["losses"], rel=1e-5)
    assert spmd[0]["rows"] == 40


@pytest.mark.xla
def test_bfloat16_stays_near(hub_folder, native):
    low = run(hub_folder, 0, backend="xla", use_spmd=True, bf16=True)
    assert low[0]["losses"] != native[0]["losses"]
    assert low[0]["losses"] == pytest.approx(native[0]["losses"], rel=5e-3)
