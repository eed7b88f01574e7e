"""`python -m torchacc` is the command `torchacc`."""

import sys

from torchacc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
