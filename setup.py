"""Packaging of torchacc."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# torch_xla 2.9.0 is its last release and loads with torch 2.9 only; its wheels are for these machines.
XLA_WHEELS = (
    'sys_platform == "linux" and platform_machine == "x86_64" '
    'and implementation_name == "cpython" and python_version < "3.14"'
)
NO_XLA_WHEELS = (
    'sys_platform != "linux" or platform_machine != "x86_64" '
    'or implementation_name != "cpython" or python_version >= "3.14"'
)
# XLA on an NVIDIA GPU: the plugin that fits torch_xla (see engines/xla/cuda.py), and the compiler and device library
# that it calls, of the same CUDA as the other libraries, which torch's wheel brings.
XLA_CUDA = [f"jax-cuda12-pjrt==0.7.1; {XLA_WHEELS}", f"nvidia-cuda-nvcc-cu12==12.8.*; {XLA_WHEELS}"]
# The compiler of TPUs, for `torchacc plan --compile-for`, which runs it in a process of its own.
JAX = [f"{name}; {XLA_WHEELS}" for name in ("jax==0.8.0", "jaxlib==0.8.0")]
PLAN_TPU = [*JAX, f"libtpu==0.0.24; {XLA_WHEELS}"]
# That of NVIDIA GPUs is the plugin by which torch_xla runs on them, so that what is compiled is what would run.
PLAN_CUDA = [*JAX, *XLA_CUDA]
# Float8 training: the one that is tested, whose Python code runs with torch 2.9; a later torch may take a later one.
FLOAT8 = [f"torchao==0.16.*; {XLA_WHEELS}", f"torchao>=0.16; {NO_XLA_WHEELS}"]
TORCH = [f"torch==2.9.0; {XLA_WHEELS}", f"torch_xla==2.9.0; {XLA_WHEELS}", f"torch>=2.9; {NO_XLA_WHEELS}"]


def read_requirements() -> list[str]:
    """Return what any installation needs beside torch."""
    lines = (ROOT / "requirements-native.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith(("#", "torch>"))]


def list_examples() -> list[tuple[str, list[str]]]:
    """Return scripts, recipes and templates of clusters, and the folder of an environment that has them."""
    files = [path for path in (ROOT / "examples").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    folders = sorted({path.parent.relative_to(ROOT) for path in files})
    return [
        (f"share/torchacc/{folder}", sorted(str(folder / path.name) for path in files if path.parent == ROOT / folder))
        for folder in folders
    ]


setup(
    name="torchacc",
    version="0.1.0",
    description="Train PyTorch models fully sharded, on XLA devices and natively",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["pytorch", "torch_xla", "fsdp", "distributed training", "tpu", "transformers"],
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["torchacc", "torchacc.*"]),
    package_data={"torchacc": ["py.typed", "aot/*.txtpb", "train/*.html", "cli/quickstart_files/*"]},
    data_files=list_examples(),
    entry_points={
        "console_scripts": [
            f"{name} = torchacc.cli.{name}:main"
            for name in ("consolidate_and_reshard_fsdp_ckpts", "consolidate_sharded_model_checkpoints")
        ]
        + ["torchacc = torchacc.cli.main:main"]
    },
    install_requires=TORCH + read_requirements(),
    extras_require={
        "xla-cuda": XLA_CUDA,
        "plan-tpu": PLAN_TPU,
        "plan-cuda": PLAN_CUDA,
        "fp8": FLOAT8,
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        # The first that was compared: the loop is taken by private names, some of which earlier releases lack.
        "hf": ["accelerate>=1.15", "transformers>=5.23,<5.24"],
        "examples": ["tokenizers", "peft"],
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist>=3.7",
            "hypothesis",
            "psutil",
            "tokenizers",
            "tensorboard",
            "wandb",
            "accelerate>=1.15",
            "lightning>=2.6",
            "peft",
            *FLOAT8,
        ],
        "docs": ["sphinx>=8.1", "myst-parser>=4", "furo"],
        "lint": ["ruff", "mypy", "types-PyYAML", "types-tqdm", "pre-commit"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
