"""Run cases of the contract on one engine, and write for each how it ended on this rank: see `casekit.main()`.

    python contract_worker.py xla-spmd-2 out/ case ...
    python ../forkrun.py 2 contract_worker.py native-2 out/ case ...

What it imports registers its cases, those first that draw random numbers before any other has.
"""

import behaviour_cases  # noqa: F401  isort: skip
import background_cases  # noqa: F401
import chunked_loss_cases  # noqa: F401
import compile_cases  # noqa: F401
import deferred_cases  # noqa: F401
import dtensor_cases  # noqa: F401
import family_cases  # noqa: F401
import gathered_loss_cases  # noqa: F401
import inference_cases  # noqa: F401
import lever_cases  # noqa: F401
import mistake_cases  # noqa: F401
import native_limits_cases  # noqa: F401
import number_cases  # noqa: F401
import order_cases  # noqa: F401
import ordinal_cases  # noqa: F401
import recompute_cases  # noqa: F401
import replacing_cases  # noqa: F401
import replica_cases  # noqa: F401
import scan_cases  # noqa: F401
import shard_reading_cases  # noqa: F401
import state_cases  # noqa: F401
import tensor_parallel_cases  # noqa: F401
import training_cases  # noqa: F401
import xla_forward_cases  # noqa: F401
import xla_operation_cases  # noqa: F401
from casekit import main

if __name__ == "__main__":
    main()
