"""Load a text, and print what came of it: for tests of several processes at once."""

import hashlib
import json
import logging
import sys

from torchacc.train.config import TextConfig
from torchacc.train.text import load_text

logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)  # torch_xla has set handlers up
print("started", flush=True)
data = load_text(TextConfig(**json.loads(sys.argv[1])), seed=0)
tokens = b"".join(block["input_ids"].numpy().tobytes() for block in data.train)
print(json.dumps([len(data.train.documents), hashlib.sha256(tokens).hexdigest()]))
