"""The configs that are tried: one for each stage, and what makes a blueprint of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jzero.blueprint import Blueprint, prepare
from jzero.config import BatchPlan, Config, plan_batch, with_fields
from jzero.data.tokenizer import make_tokenizer
from jzero.hardware import Cluster
from jzero.mesh import Device, axis_sizes, batch_shards
from jzero.models import build_model
from jzero.trainer import language_model_loss


@dataclass(frozen=True)
class Stage:
    """A stage of ZeRO to try. name: for people, "3" or "3 HSDP"."""

    name: str
    config: Config


def stages(config: Config, cluster: Cluster) -> list[Stage]:
    """The config at every stage. Of several nodes also at stage 3 within each node with copies across (HSDP), before
    stage 3 over all, unless the config has its own replicas."""
    made = [Stage(str(stage), with_fields(config, {"zero.stage": stage})) for stage in range(4)]
    within = cluster.nodes > 1 and cluster.devices_per_node > 1
    if within and config.mesh.replica == 1 and config.zero.group == "all":
        hybrid = {"mesh.replica": cluster.nodes, "mesh.data": -1, "zero.stage": 3, "zero.group": "node"}
        made.insert(3, Stage("3 HSDP", with_fields(config, hybrid | free_engine(config))))
    return made


def free_engine(config: Config) -> dict[str, Any]:
    """The fields for the gradient engine that sends less, unless the config names one."""
    return {} if "collectives" in config.zero.model_fields_set else {"zero.collectives": "auto"}


def blueprint_of(config: Config, devices: Sequence[Device] | int) -> Blueprint:
    """The configured training of the built-in model, to plan and trace (a number of devices) or to compile (absent
    ones). Attention is XLA's own, whichever the config asks for. The data is not read, but for the tokenizer."""
    vocab_size = make_tokenizer(config.data, config.model.vocab_size).vocab_size
    # The process has its platform already; the config's is that of the training. And where no cuDNN is installed, JAX
    # does not even trace its attention.
    model = config.model.model_copy(update={"attention": "xla"})
    bare = config.model_copy(update={"runtime": Config().runtime, "model": model})
    return prepare(build_model(model, vocab_size), language_model_loss, None, bare, devices)


def batch_plan(config: Config, num_devices: int) -> BatchPlan:
    """How the devices share a batch. Raises UserError where they cannot."""
    return plan_batch(config.train, batch_shards(axis_sizes(config.mesh, num_devices)))


def abstract_batch(config: Config, num_devices: int) -> dict[str, Any]:
    """The batch of one step, as the trainer's data makes it, in shapes."""
    rows, length = batch_plan(config, num_devices).global_batch_size, config.data.sequence_length
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), np.int32)}
    within = config.data.document_attention
    if within or any(source.prompt_field is not None for source in config.data.sources):
        batch["weights"] = jax.ShapeDtypeStruct((rows, length), np.bool_)
    if within:
        batch |= {name: jax.ShapeDtypeStruct((rows, length), np.int32) for name in ("segments", "positions")}
    return batch
