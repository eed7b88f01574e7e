# torchacc for CPUs: XLA's virtual devices, and natively. Build it in the repository's root:
#
#     docker build -f docker/cpu.Dockerfile -t torchacc:cpu .
#     docker run --rm -it --shm-size=1g --user "$(id -u):$(id -g)" -v "$PWD:/work" torchacc:cpu torchacc quickstart my-run
#
# --user lets it write what is yours; run the commands that it prints with -v "$PWD/my-run:/work".
#
# Not built yet: a test holds it to the package, but no machine of the project has Docker.
FROM python:3.11-slim AS build
WORKDIR /source
COPY setup.py pyproject.toml MANIFEST.in README.md CHANGELOG.md LICENSE requirements-native.txt ./
COPY torchacc torchacc
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
RUN useradd --create-home trainer
USER trainer
WORKDIR /work
# For any --user, who has no name and no home in here: caches are below HOME.
ENV PYTHONUNBUFFERED=1 HOME=/tmp USER=trainer
CMD ["torchacc", "env"]
