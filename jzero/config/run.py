"""The run: its loop, checkpoints, platform and log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from jzero.config.batch import batch_fault
from jzero.config.section import Count, Decay, Fault, Flag, Positive, Section, Size, Text, XlaFlag, shown

HOST_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class TrainConfig(Section):
    """The loop. Batch: global = micro * accumulation * shards; any two give the third (`plan_batch`)."""

    path: ClassVar[str] = "train"

    num_steps: Size = 300  # optimizer updates
    # Rows an update over all devices; null, and when only micro_batch_size is given: from the other two.
    global_batch_size: Size | None = 32
    micro_batch_size: Size | None = None  # rows a device and micro-batch; null: from the other two
    accumulation_steps: Size | None = None  # micro-batches an update; null: from the other two
    seed: Annotated[Count, Field(lt=2**32)] = 0  # of weights, data order, dropout and stochastic rounding
    frozen: tuple[Text, ...] = ()  # parameters that are not trained; path patterns, such as [embed_tokens/*]
    ema_decay: Decay | None = None  # of the moving average of the weights; null: none is kept
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
    start_from: Text | None = None  # a run directory, whose newest weights a new run starts from; null: a seed's
    start_averaged: Flag = False  # start_from: take its moving average (train.ema_decay)
    start_skip: tuple[Text, ...] = ()  # start_from: path patterns of weights not to take

    def conflicts(self) -> Iterator[Fault]:
        for name in ("start_averaged", "start_skip"):
            if self.start_from is None and (value := getattr(self, name)):
                yield Fault(
                    (f"checkpoint.{name}", "checkpoint.start_from"),
                    f"checkpoint.{name} = {shown(value)}: says how to use checkpoint.start_from, which is null; "
                    "name a run directory there, or drop it",
                )


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


def _off(given: Any) -> Any:
    return "off" if given is False else given  # YAML reads a bare `off` as false


class LogConfig(Section):
    """What is told while training."""

    path: ClassVar[str] = "log"

    every: Size = 10  # steps between console lines, and between readings of memory
    tensorboard: Flag = True  # write TensorBoard events to run_dir
    csv: Flag = False  # write metrics.csv to run_dir, the numbers of metrics.jsonl as a table
    # Project at Weights & Biases, or entity/project; null: none.
    wandb: Annotated[Text, Field(pattern="^([^/]+/)?[^/]+$")] | None = None
    flops_per_token: Positive | None = None  # to train on a token, for mfu; null: counted from the model
    grad_norms: tuple[Text, ...] = ()  # patterns such as "layers/mlp/*": a gradient norm over the parameters of each
    grad_histogram: Flag = False  # a histogram of the gradient's magnitudes each step
    profile_start: Size | None = None  # first step of a profiler trace, to run_dir/profile; null: none
    profile_steps: Size = 3  # steps traced
    # The compiled step held against its plan at each start: say what is found, end the run on it, or neither.
    audit: Annotated[Literal["warn", "error", "off"], BeforeValidator(_off)] = "warn"

    def conflicts(self) -> Iterator[Fault]:
        if self.profile_start is None and self.profile_steps != type(self).model_fields["profile_steps"].default:
            yield Fault(
                ("log.profile_steps", "log.profile_start"),
                f"log.profile_steps = {self.profile_steps}: not read without log.profile_start; "
                "drop it, or say the first step to trace",
            )
