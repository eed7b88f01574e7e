"""`python -m torchacc.train` is the command `torchacc train`."""

import sys

from torchacc.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
