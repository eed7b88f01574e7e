"""Let the tests here import their helpers, as the workers do, which are scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
