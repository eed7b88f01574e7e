"""Start the processes of a job on this machine: `torchacc launch [options] script.py arguments`."""

import argparse

from torchacc.cli._options import add_job_options, named
from torchacc.errors import ConfigError
from torchacc.launch import LaunchOptions
from torchacc.launch import run as launch
from torchacc.logging import get_logger

_log = get_logger(__name__)

EXAMPLES = (
    "torchacc launch -n 4 script.py --lr 1e-3",
    "torchacc launch -n 8 --num-nodes 2 --node-rank 0 --master-addr node0 --master-port 29500 -m package.module",
)
_DEFAULTS = LaunchOptions()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = (
        "torchacc launch [options] script.py [arguments]\n       torchacc launch [options] -m module [arguments]"
    )
    parser.add_argument(
        "-n", "--nproc", dest="num_processes", type=int, default=_DEFAULTS.num_processes, metavar="N",
        help="number of processes on this node, one per device (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--min-nproc", dest="min_processes", type=int, metavar="N",
        help="allow restarts with fewer processes, at least N, if GPUs are lost or progress stops (default: --nproc)",
    )  # fmt: skip
    parser.add_argument(
        "--log-dir",
        type=named,
        metavar="FOLDER",
        help="folder to keep the output of each process in (default: keep it on failure only)",
    )
    parser.add_argument(
        "--all-ranks", action="store_true", help="print the output of all ranks, with the rank on each line"
    )
    parser.add_argument(
        "--grace-secs", type=float, default=_DEFAULTS.grace_secs, metavar="SECS",
        help="seconds that processes have to save after SIGTERM or Ctrl-C (default: %(default).0f)",
    )  # fmt: skip
    add_job_options(parser, num_nodes="1", variables=False)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script, or module with -m, and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the job, and return the exit status."""
    if args.node_rank is None and args.num_nodes > 1:
        raise ConfigError(
            f"--num-nodes {args.num_nodes} needs --node-rank, which of the machines this is: 0 where --master-addr is, "
            f"and another from 1 to {args.num_nodes - 1} on each of the others"
        )
    args.node_rank = args.node_rank or 0
    options = LaunchOptions(**{name: getattr(args, name) for name in vars(_DEFAULTS)})
    program, *own = args.program or [""]
    if options.num_processes == 1 and own and own[0].partition("=")[0] in ("-n", "--nproc"):
        _log.warning(
            "1 process is started, and %s is handed on to %s: options of torchacc launch stand before the script, "
            "torchacc launch -n 2 %s",
            *(own[0], program, program),
        )
    return launch([*(["-m"] if args.module else []), *args.program], options)
