"""What torch.compile is told before it compiles."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchacc.engines.patches import torch_compile

LIBRARIES = Path(torch.__file__).parent / "lib"


def test_vector_code_is_tried_without_an_import_of_pytorch(tmp_path):
    from torch._inductor.cpu_vec_isa import VecISA

    torch_compile.prepare()
    if hasattr(VecISA, "_build_probe_env"):
        pytest.skip("this PyTorch imports nothing by itself")

    def loads(library: Path) -> bool:
        # -S: site-packages, where PyTorch is, cannot be imported from
        program = VecISA._avx_py_load.replace("__lib_path__", str(library))
        return subprocess.run([sys.executable, "-S", "-c", program], stderr=subprocess.DEVNULL).returncode == 0

    assert loads(LIBRARIES / "libtorch.so")  # needs libtorch_cpu.so, as what PyTorch tries does
    assert not loads(tmp_path / "missing.so")


def test_where_its_library_cannot_be_loaded_pytorch_is_imported():
    program = torch_compile._LOAD_VECTOR_CODE.format(library="no/such/library.so")
    program = program.replace("__lib_path__", str(LIBRARIES / "libtorch.so"))
    subprocess.run([sys.executable, "-c", program], check=True)
