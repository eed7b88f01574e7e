"""Scripts of other libraries' users give the same numbers once they are moved to torchacc, as docs/migrating says."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

from tests import forkrun

SCRIPTS = Path(__file__).with_name("migrating")
LIBRARIES = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning"}

pytestmark = pytest.mark.slow


def run(script, folder, *options, imports=()):
    folder.mkdir()
    done = forkrun.run(SCRIPTS / script, folder, *options, num_ranks=2, imports=imports, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    printed = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(printed), BertForSequenceClassification.from_pretrained(folder / "model").state_dict()


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    if importlib.util.find_spec(LIBRARIES[request.param]) is None:
        pytest.skip(f"needs {LIBRARIES[request.param]}")
    return request.param


@pytest.fixture(scope="module")
def before(library, tmp_path_factory):
    return run(f"{library}_before.py", tmp_path_factory.mktemp("before") / library)


@pytest.mark.parametrize("backend", ["native", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_script_trains_the_same_after_its_page(library, before, backend, tmp_path):
    imports = ["torch_xla"] if backend == "xla" else []
    numbers, weights = run(f"{library}_after.py", tmp_path / library, backend, imports=imports)
    expected, expected_weights = before
    assert len(set(expected["losses"])) == len(expected["losses"]) > 5
    assert numbers == {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()}
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=1e-4)
