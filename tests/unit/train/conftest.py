# transformers' configs import accelerate where it is installed, and that torch_xla, which sets environment variables:
# here, before the first test, and not in one of them.
from transformers import LlamaConfig  # noqa: F401
