"""The typed, frozen config and the only home of its defaults. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jzero.config_batch import BatchPlan, batch_fault, divisors, either, neighbours
from jzero.config_files import read_tree, write_yaml
from jzero.config_section import (
    AxisSize,
    Count,
    Decay,
    Fault,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Size,
    Text,
    Whole,
    XlaFlag,
    config_error,
    shown,
    unused,
)
from jzero.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
Group = Literal["all", "node"]

HOST_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class ModelConfig(Section):
    """The built-in language model, by Hugging Face's names. Sizes in elements."""

    path: ClassVar[str] = "model"

    family: Literal["llama"] = "llama"  # architecture
    vocab_size: Size | None = None  # token ids; null: the tokenizer's
    hidden_size: Size = 128  # width of the residual stream
    intermediate_size: Size | None = None  # width of the MLP; null: 8/3 hidden_size, up to a multiple of 32
    num_hidden_layers: Size = 4  # blocks
    num_attention_heads: Size = 4  # query heads a block
    num_key_value_heads: Size | None = None  # key and value heads; null: num_attention_heads
    head_dim: Size | None = None  # width of a head; null: hidden_size / num_attention_heads
    max_position_embeddings: Size = 2048  # longest sequence, tokens
    rms_norm_eps: Positive = 1e-5  # added to the mean square in RMSNorm
    rope_theta: Positive = 10000.0  # base of the rotary frequencies
    tie_word_embeddings: Flag = False  # output head = input embedding
    initializer_range: Positive = 0.02  # standard deviation of the initial weights
    scan_layers: Flag = True  # one stacked block, scanned; false: a list of blocks
    # What the backward pass computes again: nothing, all but matrix products, whole blocks.
    remat: Literal["none", "dots", "full"] = "full"
    attention: Literal["xla", "cudnn"] = "xla"  # kernel of jax.nn.dot_product_attention

    def conflicts(self) -> Iterator[Fault]:
        heads, key_value = self.num_attention_heads, self.num_key_value_heads
        if key_value and heads % key_value:
            yield Fault(
                ("model.num_key_value_heads", "model.num_attention_heads"),
                f"model.num_key_value_heads = {key_value}: must divide model.num_attention_heads = {heads}; "
                f"set model.num_key_value_heads: {either(divisors(heads))}",
            )
        if self.head_dim is None and self.hidden_size % heads:
            yield Fault(
                ("model.num_attention_heads", "model.hidden_size", "model.head_dim"),
                f"model.num_attention_heads = {heads}: must divide model.hidden_size = {self.hidden_size}; "
                f"set it to {either(neighbours(self.hidden_size, heads))}, or give model.head_dim",
            )
        elif (head_dim := self.head_dim or self.hidden_size // heads) % 2:
            told = "" if self.head_dim else f" (hidden_size {self.hidden_size} / num_attention_heads {heads})"
            yield Fault(
                ("model.head_dim", "model.hidden_size", "model.num_attention_heads"),
                f"model.head_dim = {head_dim}{told}: must be even, since rotary embeddings turn pairs; "
                f"{head_dim + 1} would do",
            )


class DataConfig(Section):
    """Where the training text comes from."""

    path: ClassVar[str] = "data"

    source: Literal["stdlib", "text", "synthetic"] = "stdlib"  # Python's own files, yours, made-up text
    paths: tuple[Text, ...] = ()  # text: files or globs
    tokenizer: Literal["bytes"] = "bytes"  # one token a byte
    sequence_length: Size = 128  # tokens the model sees at once
    validation_fraction: Fraction = 0.05  # share of the tokens kept for evaluation
    cache_dir: Text | None = None  # token cache; null: $XDG_CACHE_HOME or ~/.cache, /jzero
    num_workers: Count = 0  # Grain worker processes; its prefetch threads run regardless
    prefetch_batches: Count = 2  # batches made ahead
    synthetic_tokens: Size = 1_000_000  # synthetic: tokens in the corpus

    def conflicts(self) -> Iterator[Fault]:
        if self.source == "text" and not self.paths:
            yield Fault(
                ("data.paths", "data.source"),
                "data.paths = []: data.source = text needs files, such as data.paths: [corpus/*.txt]",
            )
        if self.source != "text" and self.paths:
            yield Fault(
                ("data.paths", "data.source"),
                f"data.paths = {shown(self.paths)}: not read by data.source = {self.source}; "
                "set data.source: text, or drop the paths",
            )
        yield from unused(self, {"synthetic_tokens": ("source", ["synthetic"])})


class MeshConfig(Section):
    """Devices along each mesh axis; at most one -1, which takes what remains."""

    path: ClassVar[str] = "mesh"

    replica: AxisSize = 1  # outer axis, slow links: nodes or slices
    data: AxisSize = -1  # inner axis, fast links
    tensor: AxisSize = 1  # innermost axis: tensor parallelism

    def conflicts(self) -> Iterator[Fault]:
        free = [f"mesh.{name}" for name in MeshConfig.model_fields if getattr(self, name) == -1]
        if len(free) > 1:
            told = f"{free[-1]} = -1: {free[0]} is -1 already; only one axis can take what remains"
            yield Fault(tuple(free), told)


class ZeroConfig(Section):
    """What ZeRO shards, and over which devices."""

    path: ClassVar[str] = "zero"

    # What is sharded: 0 nothing; 1 optimizer state; 2 gradients too; 3 parameters too.
    stage: Annotated[Literal[0, 1, 2, 3], Whole] = 3
    group: Group = "all"  # shard over replica and data, or over data only with copies a replica
    optimizer_group: Group | None = None  # the same for the optimizer state; null: group
    min_shard_elements: Count = 4096  # smaller arrays stay whole, elements
    collectives: Literal["xla"] = "xla"  # who places the collectives

    def conflicts(self) -> Iterator[Fault]:
        if self.group == "all" and self.optimizer_group == "node":
            yield Fault(
                ("zero.optimizer_group", "zero.group"),
                "zero.optimizer_group = node: cannot be narrower than zero.group = all; "
                "set zero.group: node, or zero.optimizer_group: all",
            )


_PRESETS: dict[Any, dict[str, str | None]] = {
    "fp32": {"params": "float32", "compute": "float32", "master": None, "accumulate": "float32"},
    "bf16": {"params": "bfloat16", "compute": "bfloat16", "master": "float32", "accumulate": "float32"},
}


class PrecisionConfig(Section):
    """Which dtype where. A preset's name alone will do; single fields override the preset's."""

    path: ClassVar[str] = "precision"

    preset: Literal["fp32", "bf16"] = "fp32"  # where the other fields' defaults come from
    params: Dtype = "float32"  # parameters at rest
    compute: Dtype = "float32"  # parameters and activations in the model
    master: Dtype | None = None  # the copy that the optimizer updates; null: the parameters themselves
    accumulate: Dtype = "float32"  # gradients summed over micro-batches

    @classmethod
    def complete(cls, given: Any) -> Any:
        given = {"preset": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "fp32")
        defaults = _PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        if given.get("params") == "bfloat16":
            # Without a wider copy most updates round to nothing: only `master: null`, written out, asks for that.
            defaults = {**defaults, "master": "float32"}
        if given.get("params") == defaults.get("master"):
            # Parameters that are already as wide as the preset's master are their own master.
            defaults = {**defaults, "master": None}
        return {**defaults, **given}

    def conflicts(self) -> Iterator[Fault]:
        if self.master == "bfloat16" and self.params == "float32":
            yield Fault(
                ("precision.master", "precision.params"),
                "precision.master = bfloat16: is narrower than precision.params = float32; "
                "set precision.master: null or float32",
            )


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    path: ClassVar[str] = "optimizer"

    name: Literal["adamw", "adam", "sgd"] = "adamw"  # optax's name
    learning_rate: NonNegative = 1e-3  # peak of the schedule
    # Shape after the warm-up. wsd: at the peak, then a linear decay; inverse_sqrt: peak * sqrt(warmup_steps / step).
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "piecewise"] = "cosine"
    warmup_steps: Count = 0  # steps of linear rise from 0
    decay_steps: Size | None = None  # steps to final_learning_rate, warm-up included; null: train.num_steps
    final_learning_rate: NonNegative = 0.0  # where linear, cosine and wsd end, a step after the last
    cooldown_steps: Size | None = None  # wsd: steps of the final decay; null: a tenth of decay_steps
    boundaries: tuple[Size, ...] = ()  # piecewise: steps at which the rate changes
    factors: tuple[NonNegative, ...] = ()  # piecewise: times the peak, from each boundary on
    b1: Decay = 0.9  # adam, adamw: decay of the first moment
    b2: Decay = 0.999  # adam, adamw: decay of the second moment
    eps: Positive = 1e-8  # adam, adamw: added to the root of the second moment
    momentum: Decay = 0.9  # sgd: decay of the momentum
    nesterov: Flag = False  # sgd: look ahead
    weight_decay: NonNegative = 0.0  # decoupled decay, times the learning rate
    clip_norm: Positive | None = 1.0  # largest global gradient norm; null: no clipping

    def conflicts(self) -> Iterator[Fault]:
        adam, decaying = ("name", ["adamw", "adam"]), ("schedule", ["linear", "cosine", "wsd"])
        wsd, piecewise = ("schedule", ["wsd"]), ("schedule", ["piecewise"])
        yield from unused(self, {"b1": adam, "b2": adam, "eps": adam})
        yield from unused(self, {"momentum": ("name", ["sgd"]), "nesterov": ("name", ["sgd"])})
        yield from unused(self, {"decay_steps": decaying, "final_learning_rate": decaying})
        yield from unused(self, {"cooldown_steps": wsd, "boundaries": piecewise, "factors": piecewise})
        steps, factors = self.boundaries, self.factors
        if self.schedule == "piecewise" and (
            len(steps) != len(factors) or [*steps] != sorted({*steps}) or not steps or steps[0] < self.warmup_steps
        ):
            yield Fault(
                ("optimizer.boundaries", "optimizer.factors", "optimizer.warmup_steps"),
                f"optimizer.boundaries = {shown(steps)}, optimizer.factors = {shown(factors)}: give as many of one as "
                f"of the other, the steps rising and none before optimizer.warmup_steps = {self.warmup_steps}",
            )


class TrainConfig(Section):
    """The loop. Batch: global = micro * accumulation * shards; any two give the third (`plan_batch`)."""

    path: ClassVar[str] = "train"

    num_steps: Size = 300  # optimizer updates
    # Rows an update over all devices; null, and when only micro_batch_size is given: from the other two.
    global_batch_size: Size | None = 32
    micro_batch_size: Size | None = None  # rows a device and micro-batch; null: from the other two
    accumulation_steps: Size | None = None  # micro-batches an update; null: from the other two
    seed: Annotated[Count, Field(lt=2**32)] = 0  # of weights, data order and dropout
    run_dir: Text = "runs/default"  # where config, metrics and checkpoints go
    eval_every: Count = 100  # steps between evaluations; 0: only at the end
    eval_batches: Size = 8  # batches an evaluation
    max_skipped_steps: Size = 20  # non-finite steps in a row before the run stops
    sample_tokens: Count = 96  # tokens written by the trained model at the end; 0: none
    sample_prompt: Text = "def "  # what they continue

    @classmethod
    def complete(cls, given: Any) -> Any:
        # A given micro-batch leaves the default global batch no say.
        if isinstance(given, Mapping) and given.get("micro_batch_size") is not None:
            return {"global_batch_size": None, **given}
        return given

    def conflicts(self) -> Iterator[Fault]:
        names = ("train.global_batch_size", "train.micro_batch_size", "train.accumulation_steps")
        whole = self.global_batch_size
        if whole is None and self.micro_batch_size is None:
            yield Fault(names, f"{names[0]} = null: give {names[0]} or {names[1]}, in rows")
        fault = whole and batch_fault(whole, self.micro_batch_size, self.accumulation_steps, None)
        if fault:
            yield Fault(names, f"{names[0]} = {whole}: {fault}")


class CheckpointConfig(Section):
    """When to save and what to keep."""

    path: ClassVar[str] = "checkpoint"

    save_every: Size = 100  # steps between checkpoints
    keep_last: Size = 3  # newest checkpoints kept
    keep_best: Count = 1  # checkpoints kept for the lowest evaluation loss; 0: none
    resume: Literal["auto", "never", "must"] = "auto"  # go on from the newest checkpoint in run_dir
    asynchronous: Flag = True  # write while training goes on


class RuntimeConfig(Section):
    """What must be settled before JAX starts."""

    path: ClassVar[str] = "runtime"

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # auto: JAX's choice; cpu with fake_devices
    fake_devices: Size | None = None  # CPU devices to pretend; a count in XLA_FLAGS wins
    xla_flags: tuple[XlaFlag, ...] = ()  # added to XLA_FLAGS; flags already named there win

    def conflicts(self) -> Iterator[Fault]:
        if self.fake_devices and self.platform in ("gpu", "tpu"):
            yield Fault(
                ("runtime.fake_devices", "runtime.platform"),
                f"runtime.fake_devices = {self.fake_devices}: only CPU devices can be fake, and "
                f"runtime.platform = {self.platform}; set runtime.platform: cpu, or drop fake_devices",
            )
        if self.fake_devices and any(flag.startswith(HOST_DEVICE_COUNT_FLAG) for flag in self.xla_flags):
            yield Fault(
                ("runtime.xla_flags", "runtime.fake_devices"),
                f"runtime.xla_flags = {shown(self.xla_flags)}: the device count is runtime.fake_devices = "
                f"{self.fake_devices} already; drop one of the two",
            )


class LogConfig(Section):
    """What is told while training."""

    path: ClassVar[str] = "log"

    every: Size = 10  # steps between console lines
    tensorboard: Flag = True  # write TensorBoard events to run_dir


class Config(Section):
    """The whole config. All sections have defaults; a mapping will do for any of them."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    zero: ZeroConfig = ZeroConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    log: LogConfig = LogConfig()

    def conflicts(self) -> Iterator[Fault]:
        warmup, decay, steps = self.optimizer.warmup_steps, self.optimizer.decay_steps, self.train.num_steps
        if warmup > (decay or steps):
            end = f"optimizer.decay_steps = {decay}" if decay else f"train.num_steps = {steps}"
            yield Fault(
                ("optimizer.warmup_steps", "optimizer.decay_steps", "train.num_steps"),
                f"optimizer.warmup_steps = {warmup}: longer than {end}; set at most {decay or steps}",
            )
        length, longest = self.data.sequence_length, self.model.max_position_embeddings
        if length > longest:
            yield Fault(
                ("data.sequence_length", "model.max_position_embeddings"),
                f"data.sequence_length = {length}: longer than model.max_position_embeddings = {longest}; "
                f"set model.max_position_embeddings: {length}",
            )
        platform = "cpu" if self.runtime.fake_devices else self.runtime.platform
        if self.model.attention == "cudnn" and platform in ("cpu", "tpu"):
            yield Fault(
                ("model.attention", "runtime.platform", "runtime.fake_devices"),
                f"model.attention = cudnn: runs on GPUs only, and the platform is {platform}; set model.attention: xla",
            )
        if self.model.attention == "cudnn" and self.precision.compute == "float32":
            yield Fault(
                ("model.attention", "precision.compute", "precision.preset"),
                "model.attention = cudnn: has no float32 kernels, and precision.compute = float32; "
                "set precision: bf16, or model.attention: xla",
            )


def load_config(path: str | PathLike[str] | None, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML, JSON or TOML file (None: the defaults) under `section.field=value` overrides.

    Override values are YAML; of two for one field the last wins. Raises one ConfigError that lists every
    fault of the file and the overrides, one a line.
    """
    tree, faults = read_tree(path, overrides, shorthands={"precision": "preset"})
    config = Config.model_validate(tree, context=faults)
    if faults:
        raise config_error(faults)
    return config


def make_config(source: Mapping[str, Any] | str | PathLike[str] | Config | None = None) -> Config:
    """A config from what a caller has: a mapping of sections, a file's path, a Config, or nothing."""
    if source is None or isinstance(source, str | PathLike):
        return load_config(source)
    return Config.model_validate(source)


def dump_config(config: Config) -> str:
    """Every field as YAML, in order; `load_config` reads it back equal."""
    return write_yaml(config.model_dump(mode="json"))


def plan_batch(train: TrainConfig, num_shards: int) -> BatchPlan:
    """Settles the three batch sizes over `num_shards`, the devices along replica and data.

    Any two give the third; the global size or the micro-batch alone means no accumulation. Raises ConfigError
    with all the numbers and the nearest that fit.
    """
    whole, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    if whole is not None and (fault := batch_fault(whole, micro, steps, num_shards)):
        default = "" if "global_batch_size" in train.model_fields_set else " (the default)"
        raise ConfigError(f"train.global_batch_size = {whole}{default}: {fault}")
    if micro is None:
        assert whole is not None, "TrainConfig refuses to be without both"
        micro = whole // (num_shards * (steps or 1))
    if steps is None:
        steps = 1 if whole is None else whole // (num_shards * micro)
    return BatchPlan(micro * steps * num_shards, micro, steps)
