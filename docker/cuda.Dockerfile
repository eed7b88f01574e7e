# torchacc for NVIDIA GPUs, natively or under XLA. PyTorch's wheels bring CUDA; the host needs NVIDIA's driver, of
# CUDA 12.8 or later, and its container toolkit. Build it in the repository's root:
#
#     docker build -f docker/cuda.Dockerfile -t torchacc:cuda .
#     docker run --rm -it --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/work" torchacc:cuda torchacc env
#
# Not built yet: a test holds it to the package, but no machine of the project has Docker.
FROM python:3.11-slim AS build
WORKDIR /source
COPY setup.py pyproject.toml MANIFEST.in README.md CHANGELOG.md LICENSE requirements-native.txt ./
COPY torchacc torchacc
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# Triton, which compute.compile and FlexAttention write kernels with, calls a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[xla-cuda]" && rm -r /wheels
RUN useradd --create-home trainer
USER trainer
WORKDIR /work
# For any --user, who has no name and no home in here: caches are below HOME.
ENV PYTHONUNBUFFERED=1 HOME=/tmp USER=trainer NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["torchacc", "env"]
