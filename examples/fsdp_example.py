"""Train a stage of examples/config.yaml with one of its presets, or of a file of your own with --config.

One machine with four devices (CPUs, where there is nothing better):

    python examples/fsdp_example.py --fsdp-config single_node_fsdp --devices 4

Several machines, with this command on each; RANK is the machine's number:

    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 RANK=0 \\
        python examples/fsdp_example.py --fsdp-config multi_node_fsdp --num-nodes 2 --devices 8

The second stage, which starts from the first:

    python examples/fsdp_example.py --stage stage2 --fsdp-config single_node_fsdp --devices 2

It is the command `torchacc train` with another default for --config.
"""

import sys
from pathlib import Path

from torchacc.cli.main import main

if __name__ == "__main__":
    config = Path(__file__).with_name("config.yaml")
    sys.exit(main(["train", f"--config={config}", *sys.argv[1:]]))
