"""What several tests here share."""

import json

import pytest

from tests import forkrun


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Why each case of the module's PROGRAM failed, or None, by its name."""
    folder = tmp_path_factory.mktemp(request.module.PROGRAM.stem)
    done = forkrun.run(request.module.PROGRAM, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())
