"""A training step of GPT-2 in plain JAX, sharded as FULL_SHARD shards it: the program, not compiled.

It is a program of its own, `python -I _jax_gpt2.py FOLDER`, as JAX's libtpu is not to be loaded beside torch_xla.
FOLDER has `step.json`, the fields of `Step`; there it writes `program.pb`, an HloModuleProto, and `inputs.json`, how
its inputs lie on the devices.

What is computed in which dtype is what PyTorch's autocast makes of transformers' GPT-2: products in bfloat16, norms,
the softmax and the loss in float32, and so are embeddings, the sum that runs through the layers and GELU, unless the
step asks for another dtype. Weights are gathered in bfloat16 for each block's forward, and again for its backward.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "fsdp"
RATE, DECAY, BETAS, EPSILON = 1e-3, 0.01, (0.9, 0.999), 1e-8
"""Of AdamW, as PyTorch has it."""
BLOCK = 512
"""Tokens of a block of the kernel, in every direction, as torchacc takes them."""

Weights = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What is trained, and on which chips."""

    topology: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    """Samples on each chip."""
    attention: str
    """`plain`, or `kernel` for splash attention."""
    between: str
    """The dtype of what lies between products: embeddings, their sum with what the layers add, GELU."""


class Gpt2:
    """The model, on a mesh."""

    def __init__(self, step: Step, mesh: Mesh) -> None:
        self.step, self.mesh = step, mesh
        self._attend = _splash(step, mesh) if step.attention == "kernel" else _plain_attention

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight."""
        step, width = self.step, self.step.width
        found: dict[str, tuple[int, ...]] = {"wte": (step.vocabulary, width), "wpe": (step.length, width)}
        for layer in range(step.layers):
            found |= {f"{layer}.{name}": shape for name, shape in _shapes_of_block(width).items()}
        return {**found, "ln_f": (width,), "ln_f_bias": (width,)}

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return how a weight lies at rest: split over its first dimension that divides."""
        divides = [size % self.mesh.size == 0 for size in shape]
        first = divides.index(True) if any(divides) else None
        return NamedSharding(self.mesh, PartitionSpec(*(AXIS if dim == first else None for dim in range(len(shape)))))

    def loss(self, weights: Weights, tokens: Any) -> Any:
        """Return the mean loss of the next tokens."""
        table = self._gathered(weights["wte"])  # once, as the head needs it first in backward
        positions = self._gathered(weights["wpe"])
        hidden = self._by_samples(table[tokens] + positions[: tokens.shape[1]])
        for layer in range(self.step.layers):
            own = {name: weights[f"{layer}.{name}"] for name in _shapes_of_block(self.step.width)}
            hidden = self._block(own, hidden)
        hidden = _layer_norm(hidden, weights["ln_f"], weights["ln_f_bias"])
        logits = (hidden.astype(jnp.bfloat16) @ table.astype(jnp.bfloat16).T).astype(jnp.float32)
        is_next = jnp.roll(tokens, -1, 1)[..., None] == jnp.arange(self.step.vocabulary)
        losses = jax.nn.logsumexp(logits, -1) - jnp.where(is_next, logits, 0).sum(-1)
        has_next = jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
        return jnp.where(has_next, losses, 0).sum() / (tokens.shape[0] * (tokens.shape[1] - 1))

    def _block(self, weights: Weights, hidden: Any) -> Any:
        product = partial(self._product, weights)
        normed = _layer_norm(hidden, weights["ln_1"], weights["ln_1_bias"])
        query, key, value = map(self._by_heads, jnp.split(product("c_attn", normed), 3, -1))
        attended = self._attend(query, key, value).transpose(0, 2, 1, 3).reshape(hidden.shape)
        hidden = self._by_samples(hidden + product("attn_c_proj", attended))
        normed = _layer_norm(hidden, weights["ln_2"], weights["ln_2_bias"])
        inner = jax.nn.gelu(product("c_fc", normed).astype(self.step.between))
        return self._by_samples(hidden + product("mlp_c_proj", inner))

    def _product(self, weights: Weights, name: str, values: Any) -> Any:
        """Return values times a weight, which backward gathers again, plus its bias."""

        @jax.custom_vjp
        def multiply(values: Any, shard: Any) -> Any:
            return values @ self._whole(shard)

        def backward(kept: tuple[Any, Any], gradient: Any) -> tuple[Any, Any]:
            values, shard = kept
            # Without the barrier XLA would keep what forward has gathered.
            weight = self._whole(jax.lax.optimization_barrier(shard))
            return gradient @ weight.T, self._split(jnp.einsum("bti,bto->io", values, gradient))

        multiply.defvjp(lambda *given: (multiply(*given), given), backward)
        shard = self._split(weights[name].astype(jnp.bfloat16))
        return multiply(values.astype(jnp.bfloat16), shard) + weights[f"{name}_bias"].astype(jnp.bfloat16)

    def _gathered(self, weight: Any) -> Any:
        """Return a weight whole; its gradient is split again, which makes XLA reduce and scatter it."""
        gather = jax.custom_vjp(self._whole)
        gather.defvjp(lambda shard: (gather(shard), None), lambda _, gradient: (self._split(gradient),))
        return gather(self._split(weight.astype(self.step.between)))

    def _whole(self, weight: Any) -> Any:
        return jax.lax.with_sharding_constraint(weight, NamedSharding(self.mesh, PartitionSpec()))

    def _split(self, weight: Any) -> Any:
        return jax.lax.with_sharding_constraint(weight, self.sharding(weight.shape))

    def _by_samples(self, values: Any) -> Any:
        return jax.lax.with_sharding_constraint(values, NamedSharding(self.mesh, PartitionSpec(AXIS)))

    def _by_heads(self, values: Any) -> Any:
        samples, length, width = values.shape
        return values.reshape(samples, length, self.step.heads, width // self.step.heads).transpose(0, 2, 1, 3)


def main(folder: Path) -> None:
    """Write the program of a step."""
    jax.config.update("jax_use_shardy_partitioner", False)  # as torch_xla's programs are annotated for GSPMD
    step = Step(**json.loads((folder / "step.json").read_text()))
    devices = sorted(topologies.get_topology_desc(step.topology, platform="tpu").devices, key=lambda each: each.id)
    model = Gpt2(step, Mesh(np.array(devices), (AXIS,)))
    lowered, inputs = lower(model)
    (folder / "program.pb").write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    (folder / "inputs.json").write_text(json.dumps(inputs))


def lower(model: Gpt2) -> tuple[Any, list[dict[str, Any]]]:
    """Return the step of a model as JAX lowers it, and how each of its inputs lies on the devices."""
    step, mesh = model.step, model.mesh
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=model.sharding(shape))
        for name, shape in model.shapes().items()
    }
    count = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    samples = NamedSharding(mesh, PartitionSpec(AXIS))
    tokens = jax.ShapeDtypeStruct((step.batch * mesh.size, step.length), jnp.int32, sharding=samples)
    kept = (weights, weights, weights, count)
    shardings = jax.tree.map(lambda each: each.sharding, (kept, count))
    trained = jax.jit(partial(_train, model), donate_argnums=0, out_shardings=shardings)
    return trained.lower(kept, tokens), [_input(each) for each in jax.tree.leaves((kept, tokens))]


def _input(value: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Return an input as torchacc's recorder describes one; JAX itself notes in the program which it may write to."""
    over = [value.sharding.mesh.size if name else 1 for name in value.sharding.spec]
    over += [1] * (len(value.shape) - len(over))
    is_split = any(size > 1 for size in over)
    tiles = f"{{devices=[{','.join(map(str, over))}]<=[{value.sharding.mesh.size}]}}"
    return {"sharding": tiles if is_split else "{replicated}", "is_donated": False}


def _train(model: Gpt2, kept: Any, tokens: Any) -> Any:
    """Return weights, both moments and the number of steps after a step, and the loss."""
    weights, first, second, count = kept
    loss, gradients = jax.value_and_grad(model.loss)(weights, tokens)
    count = count + 1
    updated = {name: _adamw(weights[name], first[name], second[name], gradients[name], count) for name in weights}
    return (*({name: each[place] for name, each in updated.items()} for place in range(3)), count), loss


def _adamw(weight: Any, first: Any, second: Any, gradient: Any, count: Any) -> tuple[Any, Any, Any]:
    first = BETAS[0] * first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    size = jnp.sqrt(second / (1 - BETAS[1] ** count)) + EPSILON
    return weight * (1 - RATE * DECAY) - RATE * first / (1 - BETAS[0] ** count) / size, first, second


def _shapes_of_block(width: int) -> dict[str, tuple[int, ...]]:
    products = {"c_attn": (width, 3 * width), "attn_c_proj": (width, width)}
    products |= {"c_fc": (width, 4 * width), "mlp_c_proj": (4 * width, width)}
    biases = {f"{name}_bias": shape[1:] for name, shape in products.items()}
    norms = dict.fromkeys(("ln_1", "ln_1_bias", "ln_2", "ln_2_bias"), (width,))
    return {**products, **biases, **norms}


def _layer_norm(values: Any, scale: Any, bias: Any) -> Any:
    values = values.astype(jnp.float32)
    centered = values - values.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _plain_attention(query: Any, key: Any, value: Any) -> Any:
    """Attend by all scores, of values of shape (samples, heads, tokens, size)."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), -1).astype(value.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", shares, value)


def _splash(step: Step, mesh: Mesh) -> Callable[[Any, Any, Any], Any]:
    """Return what attends by JAX's kernel for TPUs, on each chip's samples."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = library.BlockSizes(**dict.fromkeys((f"block_{name}" for name in names), min(BLOCK, step.length)))
    mask = masks.MultiHeadMask([masks.CausalMask((step.length, step.length))] * step.heads)
    kernel = library.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.vmap(kernel)(query * query.shape[-1] ** -0.5, key, value)

    by_samples = PartitionSpec(AXIS)
    return jax.shard_map(attend, mesh=mesh, in_specs=by_samples, out_specs=by_samples, check_vma=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
