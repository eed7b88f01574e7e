"""Run cases of the contract on one engine, and write for each how it ended on this rank: see `casekit.main()`.

    python contract_worker.py xla-spmd-2 out/ case ...
    python ../forkrun.py 2 contract_worker.py native-2 out/ case ...

It imports each `*_cases.py`, which registers its cases.
"""

import faulthandler
import importlib
from pathlib import Path

import behaviour_cases  # noqa: F401 - the first, as its first case is about random numbers that none has drawn before
from casekit import main

for path in sorted(Path(__file__).parent.glob("*_cases.py")):
    importlib.import_module(path.stem)

if __name__ == "__main__":
    faulthandler.enable()
    main()
