"""`torchacc.save()` in one process: what has no values, or could not be loaded, is refused before a file is there."""

from typing import Any

import pytest
import torch

import torchacc
from torchacc.errors import CheckpointError


class Unpicklable:
    """Raises without a word when it is pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError


NOT_SAVED = {
    "meta": (lambda: torch.empty(3, device="meta"), "is on the device meta, and has no values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"is nested: save its unbind\(\)"),
    "error-without-text": (Unpicklable, r"file\.pth was not written: RuntimeError\(\)"),
}


@pytest.mark.parametrize(("make", "message"), NOT_SAVED.values(), ids=NOT_SAVED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # prototypes
def test_what_could_not_be_loaded_is_refused(tmp_path, make, message):
    with pytest.raises(CheckpointError, match=message):
        torchacc.save({"x": [make()]}, tmp_path / "file.pth")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="later versions of PyTorch have no named tensors")
@pytest.mark.filterwarnings("ignore::UserWarning")  # prototypes
def test_a_named_tensor_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"is named: save its rename\(None\)"):
        torchacc.save(torch.zeros(2, names=("a",)), tmp_path / "file.pth")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore::UserWarning")  # prototypes
def test_sparse_tensors_come_back(tmp_path, layout):
    sparse = torch.eye(3).to_sparse(layout=layout)
    torchacc.save({"x": sparse}, tmp_path / "file.pth")
    found = torchacc.load(tmp_path / "file.pth")["x"]
    assert found.layout is layout
    assert torch.equal(found.to_dense(), torch.eye(3))


@pytest.mark.parametrize("name", ["", ".", "/", "folder"])
def test_a_folder_is_no_file(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is a folder: name a file"):
        torchacc.save({}, name)


def test_what_a_link_leads_to_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.pth"
    link.symlink_to("real/file.pth")
    for number in (1, 2):  # where there is no such file yet, and where there is
        torchacc.save({"x": number}, link)
        assert link.is_symlink()
        assert torchacc.load(tmp_path / "real" / "file.pth") == {"x": number}
