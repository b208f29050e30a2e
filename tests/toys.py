"""Small models, losses and batches that several test files train. The models are plain Flax NNX, unaware of jzero.

The sizes are odd, so that most leaves are padded on 2, 3 and 8 devices; 39 and 129 divide by 3.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jzero

VOCAB, WIDTH, HIDDEN, LAYERS, LENGTH = 129, 13, 35, 2, 8


class Norm(nnx.Module):
    """x / rms(x) * scale in float32, in x's dtype (strict promotion refuses what nnx.RMSNorm does in bfloat16)."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
        return (wide * inverse * self.scale.astype(jnp.float32)).astype(x.dtype)


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x * factor in float32, in x's dtype: the scalar's gradient sums all of x, which loses its value in bfloat16."""
    return (x.astype(jnp.float32) * factor.astype(jnp.float32)).astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm causal attention (one head) and MLP; the MLP's share is scaled by a learnable scalar."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm_1 = Norm()
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm_2 = Norm()
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.qkv(self.norm_1(x)), 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", query, key).astype(jnp.float32) / WIDTH**0.5
        causal = jnp.tri(x.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(x.dtype)
        x = x + self.out(jnp.einsum("bts,bsd->btd", weights, value))
        return x + scale(self.down(nnx.gelu(self.up(self.norm_2(x)))), self.gain[...])


class Decoder(nnx.Module):
    """Tokens int [B, T] -> logits [B, T, VOCAB]; tied embedding, a 0-d temperature, rematerialised blocks.

    scanned: the blocks are one stack that nnx.scan runs over, else an nnx.List. Both start from the same numbers.
    """

    def __init__(self, rngs: nnx.Rngs, scanned: bool):
        self.scanned = scanned
        self.embedding = nnx.Param(0.3 * jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.log_scale = nnx.Param(jnp.zeros(()))
        keys = jax.random.split(rngs.params(), LAYERS)
        if scanned:
            self.blocks = nnx.vmap(lambda key: Block(nnx.Rngs(params=key)))(keys)
        else:
            self.blocks = nnx.List([Block(nnx.Rngs(params=key)) for key in keys])
        self.norm = Norm()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run = nnx.remat(lambda block, x: block(x), prevent_cse=not self.scanned)
        x = self.embedding[tokens]
        if self.scanned:
            x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return scale(self.norm(x) @ self.embedding.T, jnp.exp(self.log_scale[...]))


class MLP(nnx.Module):
    """x [B, 7] -> [B, 5]: the smallest thing with matrices, vectors and padding on 2, 3 and 8 devices."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(7, 35, rngs=rngs)
        self.down = nnx.Linear(35, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.tanh(self.up(x)))


class Megatron(nnx.Module):
    """A pair of matrices that the model itself splits over the tensor axis."""

    def __init__(self, rngs: nnx.Rngs):
        split = lambda *spec: nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
        self.up = nnx.Linear(7, 10, kernel_init=split(None, "tensor"), rngs=rngs)
        self.down = nnx.Linear(10, 5, kernel_init=split("tensor", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.tanh(self.up(x)))


def scanned_decoder(rngs: nnx.Rngs) -> Decoder:
    return Decoder(rngs, scanned=True)


def listed_decoder(rngs: nnx.Rngs) -> Decoder:
    return Decoder(rngs, scanned=False)


def mlp(rngs: nnx.Rngs) -> MLP:
    return MLP(rngs)


def token_loss(model, batch: dict[str, jax.Array]) -> jzero.WeightedLoss:
    """Cross-entropy of the next token, over the tokens that count."""
    tokens = batch["tokens"]
    return jzero.cross_entropy(model(tokens[:, :-1]), jnp.where(batch["counts"], tokens[:, 1:], -1))


def token_batch(rows: int, step: int) -> dict[str, np.ndarray]:
    """tokens int32 [rows, LENGTH + 1], mostly a fixed map of the token before; counts bool [rows, LENGTH].

    How many tokens of a row count differs much between rows, none for some: a mean of means over devices or
    micro-batches is another number than the mean.
    """
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1))
    for t in range(LENGTH):
        follows = rng.random(rows) < 0.9
        tokens[:, t + 1] = np.where(follows, (5 * tokens[:, t] + 1) % VOCAB, tokens[:, t + 1])
    counts = np.arange(LENGTH) < (np.arange(rows) ** 2 % (LENGTH + 1))[:, None]
    return {"tokens": tokens.astype(np.int32), "counts": counts}


def square_loss(model, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean square error of x -> y; a scalar, so a mean over the rows."""
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def square_batch(rows: int, step: int) -> dict[str, np.ndarray]:
    """x float32 [rows, 7], y float32 [rows, 5]."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(rows, 7)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, :5]) + x[:, 2:7]}


def unstack(params: dict[str, np.ndarray], prefix: str = "blocks") -> dict[str, np.ndarray]:
    """A scanned model's parameters by the paths of its listed twin, whose own stay: blocks/up -> blocks/0/up, ..."""
    flat = {}
    for path, value in params.items():
        head, _, rest = path.partition("/")
        layers = range(len(value)) if head == prefix and not rest[0].isdigit() else ()
        flat |= {f"{prefix}/{i}/{rest}": value[i] for i in layers} or {path: value}
    return flat


def bytes_a_device(arrays) -> int:
    """Bytes of a pytree of arrays on each device, read from the shards that are really there; all must hold as many."""
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    (count,) = set(held.values()) or {0}
    return count


def smallest_split(shape: tuple[int, ...], stack_ndim: int, count: int) -> int:
    """Elements a device of an array split over `count` devices along the dim that pads least; all of a scalar's."""
    size = int(np.prod(shape))
    return min((size // n * -(-n // count) for n in shape[stack_ndim:]), default=size)
