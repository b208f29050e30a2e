"""The typed, frozen config and the only home of its defaults. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from jzero.config.batch import BatchPlan, batch_fault
from jzero.config.data import DataConfig, MixtureConfig
from jzero.config.files import read_tree, write_yaml
from jzero.config.hardware import HardwareConfig
from jzero.config.model import ModelConfig
from jzero.config.optimizer import OptimizerConfig
from jzero.config.precision import LossScaleConfig, PrecisionConfig
from jzero.config.run import HOST_DEVICE_COUNT_FLAG, CheckpointConfig, LogConfig, RuntimeConfig, TrainConfig
from jzero.config.section import Fault, Section, config_error, shown
from jzero.config.zero import MeshConfig, ZeroConfig
from jzero.errors import ConfigError

__all__ = [
    "HOST_DEVICE_COUNT_FLAG",
    "BatchPlan",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "HardwareConfig",
    "LogConfig",
    "LossScaleConfig",
    "MeshConfig",
    "MixtureConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RuntimeConfig",
    "TrainConfig",
    "ZeroConfig",
    "dump_config",
    "load_config",
    "make_config",
    "plan_batch",
    "with_fields",
]


class Config(Section):
    """The whole config. All sections have defaults; a mapping will do for any of them."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    zero: ZeroConfig = ZeroConfig()
    precision: PrecisionConfig = PrecisionConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    log: LogConfig = LogConfig()
    hardware: HardwareConfig = HardwareConfig()

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
        narrow = "float16" in (self.precision.params, self.precision.compute)
        if not narrow and (given := self.loss_scale.model_dump(exclude_defaults=True)):
            name, value = next(iter(given.items()))
            yield Fault(
                (f"loss_scale.{name}", "precision.compute", "precision.preset"),
                f"loss_scale.{name} = {shown(value)}: only float16 needs a loss scale, and precision.compute = "
                f"{self.precision.compute}; set precision: fp16, or drop it",
            )
        if self.zero.collectives == "xla" and self.precision.reduces_otherwise:
            yield Fault(
                ("precision.reduce", "zero.collectives", "precision.compute", "precision.preset"),
                f"precision.reduce = {self.precision.reduce}: zero.collectives = xla sums gradients over devices in "
                f"precision.compute = {self.precision.compute}; set zero.collectives: explicit or auto, or "
                "precision.reduce: null",
            )
        size, end = self.model.vocab_size, self.data.end_token_id
        if self.data.tokenizer is None and size is None:
            yield Fault(
                ("model.vocab_size", "data.tokenizer"),
                "model.vocab_size = null: data.tokenizer = null has no vocabulary to go by; set model.vocab_size to "
                "the number of token ids",
            )
        if end is not None and size is not None and end >= size:
            yield Fault(
                ("data.end_token_id", "model.vocab_size"),
                f"data.end_token_id = {end}: must be less than model.vocab_size = {size}",
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
        if self.log.profile_start and self.log.profile_start > steps:
            yield Fault(
                ("log.profile_start", "train.num_steps"),
                f"log.profile_start = {self.log.profile_start}: after the last step, train.num_steps = {steps}; "
                f"set at most {steps}",
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


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values of dotted fields, checked anew; what it leaves out stays left out."""
    tree = config.model_dump(exclude_unset=True)
    for name, value in values.items():
        section, _, field = name.partition(".")
        tree.setdefault(section, {})[field] = value
    return make_config(tree)


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
