"""The engine: a sharded training state and the programs that step, evaluate, save and restore it. For users who own
their loop; the trainer drives one too."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import RenderableType

from jzero.adapt import adapt
from jzero.checkpoint import ArrayTarget, Checkpointer
from jzero.config import Config, OptimizerConfig, PrecisionConfig, TrainConfig, make_config, plan_batch
from jzero.elementwise import assert_drivable, is_elementwise
from jzero.errors import ConfigError, DataError, ModelError, UserError
from jzero.grads import Loss, bind_params, make_grad_fn
from jzero.mesh import BATCH_AXES, Device, make_mesh
from jzero.model_api import Model
from jzero.optim import make_optimizer
from jzero.plan import Plan, make_plan, map_leaves
from jzero.report import plan_report
from jzero.runtime import start
from jzero.schedules import make_schedule
from jzero.state import TrainState, assert_placement, from_named, init_state, named, plan_tree, shardings
from jzero.step import Metrics, make_eval_step, make_train_step
from jzero.usepoint import UsePoint, use_points


def initialize(
    model: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation | None = None,
    config: Mapping[str, Any] | str | Path | Config | None = None,
    devices: Sequence[Device] | None = None,
) -> "Engine":
    """An engine with a freshly initialised, sharded state.

    model: a function of nnx.Rngs that builds a Flax NNX module (preferred: nothing is ever built whole), or a built
    module, whose values are the start. loss(model, batch) returns a scalar (a mean over the batch's rows), a
    WeightedLoss, or either with a dict of extra metrics. optimizer: any optax transformation; None makes
    config.optimizer. config: a mapping, a path, a Config, or None for the defaults. devices: None for all of them.

    Raises a UserError naming the field and the fix for anything that cannot work, before anything is compiled.
    """
    return Engine(prepare(model, loss, optimizer, config, devices))


def prepare(
    model: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation | None = None,
    config: Mapping[str, Any] | str | Path | Config | None = None,
    devices: Sequence[Device] | None = None,
) -> "Blueprint":
    """What `initialize` builds its engine from, with nothing placed: absent devices (`jzero.mesh.topology`) will do."""
    config = make_config(config)
    if not callable(loss):
        raise ModelError(
            f"loss is {loss!r}: give a function loss(model, batch) that returns a scalar or a WeightedLoss."
        )
    _warn_of_lost_updates(config.precision)
    start(config.runtime)
    mesh = make_mesh(config.mesh, devices)
    accumulating = _accumulates(config.train, mesh)
    adapted = adapt(model)
    schedule = None
    if optimizer is not None:
        _assert_only_clips(config.optimizer)
        assert_drivable(optimizer, {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in adapted.params.items()})
    else:
        schedule = make_schedule(config.optimizer, config.train.num_steps)
        optimizer = make_optimizer(config.optimizer, config.train.num_steps, adapted.params)
    plan = make_plan(
        adapted.params,
        dict(mesh.shape),
        config.zero,
        config.precision,
        optimizer,
        adapted.model_state,
        accumulating=accumulating,
    )
    return Blueprint(config, mesh, adapted, loss, optimizer, schedule, plan)


@dataclass(frozen=True)
class Blueprint:
    """All that makes an engine but its arrays."""

    config: Config
    mesh: Mesh
    model: Model
    loss: Loss
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    plan: Plan

    @cached_property
    def points(self) -> dict[str, UsePoint]:
        return use_points(self.plan, self.mesh, self.config.precision.compute)

    @cached_property
    def elementwise(self) -> bool:
        plans = self.plan.weights.items()
        return is_elementwise(self.optimizer, {p: jax.ShapeDtypeStruct(w.stored_shape, w.dtype) for p, w in plans})

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def train_step(self, num_micro_batches: int) -> Any:
        """The jitted step over a batch of that many micro-batches: (state, batch) -> (state, metrics)."""
        accumulate = self.config.precision.accumulate
        grad_fn = make_grad_fn(self.model, self.loss, self.plan, self.mesh, self.points, num_micro_batches, accumulate)
        return make_train_step(
            grad_fn,
            self.optimizer,
            self.plan,
            self.mesh,
            elementwise=self.elementwise,
            clip_norm=self.config.optimizer.clip_norm,
            schedule=self.schedule,
        )

    def eval_step(self, num_micro_batches: int) -> Any:
        """The jitted evaluation of a batch in that many parts: (state, batch) -> metrics."""
        return make_eval_step(self.model, self.loss, self.points, self.mesh, num_micro_batches)

    def lower_step(self, batch: Any) -> jax.stages.Lowered:
        """The training step for a batch of (abstract) arrays, lowered, to look at or compile."""
        state = map_leaves(
            lambda leaf, placement: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype, sharding=placement),
            plan_tree(self.plan),
            shardings(self.plan, self.mesh),
        )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding), batch)
        return self.train_step(self.micro_batches(batch)).lower(state, shapes)

    def micro_batches(self, batch: Any) -> int:
        """How many micro-batches a batch is cut into. Raises ConfigError for rows that do not divide, or are not those
        that `train.global_batch_size` was set to."""
        rows, train = self.check_rows(batch), self.config.train
        if "global_batch_size" in train.model_fields_set and train.global_batch_size not in (None, rows):
            raise ConfigError(
                f"the batch has {rows} rows, but train.global_batch_size = {train.global_batch_size}; give as many, or "
                "drop the field: a step takes any number then"
            )
        return _accumulation(self.config.train.model_copy(update={"global_batch_size": rows}), self.mesh)

    def evaluation_parts(self, batch: Any) -> int:
        """How many parts an evaluation takes, so that none has more rows than a training micro-batch."""
        train, rows = self.config.train, self.check_rows(batch) // _num_batch_shards(self.mesh)
        wanted = -(-rows // train.micro_batch_size) if train.micro_batch_size else train.accumulation_steps or 1
        return next(parts for parts in range(min(wanted, rows), rows + 1) if rows % parts == 0)

    def check_rows(self, batch: Any) -> int:
        """The rows of a batch. Raises ConfigError unless they divide over the devices of the batch axes."""
        rows, shards = _rows(batch), _num_batch_shards(self.mesh)
        if rows == 0:
            raise ConfigError("the batch has no rows.")
        if rows % shards:
            raise ConfigError(
                f"the batch has {rows} rows, which do not divide over {shards} devices of the batch axes "
                f"(replica x data); give {rows - rows % shards or shards} or {rows + -rows % shards}."
            )
        return rows


class Engine:
    """Made by `initialize`. Holds the state; every method leaves it sharded as the plan says."""

    def __init__(self, blueprint: Blueprint):
        self.config, self.mesh, self.plan = blueprint.config, blueprint.mesh, blueprint.plan
        self._blueprint = blueprint
        self._train_steps: dict[int, Any] = {}
        self._eval_steps: dict[int, Any] = {}
        self._applied: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.state = init_state(blueprint.model, blueprint.optimizer, self.plan, self.mesh, self.config.train.seed)
        assert_placement(self.state, self.plan, self.mesh)

    @property
    def num_parameters(self) -> int:
        return self.plan.num_parameters

    def step(self, batch: Any) -> Metrics:
        """One optimizer step over a batch of host (or device) arrays whose leading dimension is the global batch.

        Returns float32/int32 device scalars: loss, weight, grad_norm (before clipping), skipped (steps so far that
        changed nothing), skipped_in_a_row, non_finite_leaf (the number in `plan.gradients` of the first leaf that is
        not finite, -1: none), learning_rate where the schedule is jzero's, and the loss's extra metrics.
        """
        train_step = self._train_step(self._blueprint.micro_batches(batch))
        state, batch = self._live_state, self.place(batch)
        self._settled(state.step)
        self.state, metrics = train_step(state, batch)
        return metrics

    def evaluate(self, batch: Any) -> Metrics:
        """Loss, weight and extra metrics of a batch in evaluation mode (dropout off, running statistics)."""
        parts = self._blueprint.evaluation_parts(batch)
        if parts not in self._eval_steps:
            self._eval_steps[parts] = self._blueprint.eval_step(parts)
        return self._settled(self._eval_steps[parts](self._live_state, self.place(batch)))

    def apply(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(model, *args), jitted once per fn, on the sharded parameters in evaluation mode."""
        if fn not in self._applied:

            def applied(state: TrainState, *args: Any) -> Any:
                params = bind_params(state.params, self._blueprint.points)
                return fn(
                    self._blueprint.model.bind(params, state.model_state, jnp.zeros(2, jnp.int32), train=False), *args
                )

            self._applied[fn] = jax.jit(applied)
        return self._settled(self._applied[fn](self._live_state, *args))

    def place(self, batch: Any) -> Any:
        """A batch of host arrays on the mesh, rows split over the batch axes."""
        sharding = self._blueprint.batch_sharding
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, _narrow(x)), batch)

    def lower_step(self, batch: Any) -> jax.stages.Lowered:
        """The training step for a batch of (abstract) arrays, lowered, to look at or compile."""
        return self._blueprint.lower_step(batch)

    def params(self) -> dict[str, np.ndarray]:
        """The weights the optimizer holds (float32 masters where there are any), whole, in true shapes, on the host."""
        weights = self._live_state.weights
        return {path: leaf.cut(np.asarray(weights[path])) for path, leaf in self.plan.weights.items()}

    def model(self) -> Any:
        """The user's model holding copies of the current parameters in true shapes, in evaluation mode, to call."""
        # Copies: the next step consumes the state's own arrays.
        params, model_state = jax.tree.map(jnp.copy, (self._live_state.params, self._live_state.model_state))
        params = {path: leaf.cut(params[path]) for path, leaf in self.plan.params.items()}
        return self._blueprint.model.bind(params, model_state, jnp.zeros(2, jnp.int32), train=False)

    def report(self) -> RenderableType:
        """The start-up report: bytes a device by tree, what stayed whole and why."""
        return plan_report(self.plan)

    def arrays(self) -> dict[str, jax.Array]:
        """Every array of the state by name, in stored shapes."""
        return named(self._live_state)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The true shape of every array of the state by name."""
        return {name: leaf.shape for name, leaf in named(plan_tree(self.plan)).items()}

    def targets(self) -> dict[str, ArrayTarget]:
        """What a checkpoint has to restore for this plan and mesh, by name."""
        placement = named(shardings(self.plan, self.mesh))
        return {
            name: ArrayTarget(leaf.shape, leaf.stored_shape, leaf.dtype, placement[name])
            for name, leaf in named(plan_tree(self.plan)).items()
        }

    def load(self, arrays: Mapping[str, jax.Array]) -> None:
        """Take a state from arrays by name, as `targets` describes them."""
        state = from_named(self.plan, arrays)
        assert_placement(state, self.plan, self.mesh)
        self.state = state

    def save(
        self, directory: str | Path, record: Mapping[str, Any] | None = None, keep_last: int | None = None
    ) -> None:
        """Write the state as a checkpoint of its step and wait until it is complete.

        keep_last: delete all but so many of the newest checkpoints there; None: none is deleted. Those with an
        evaluation loss, which the trainer's may have, always stay.
        """
        with self._checkpointer(directory, keep_last) as checkpointer:
            checkpointer.save(int(self.state.step), self.arrays(), self.shapes(), dict(record or {}))

    def restore(self, directory: str | Path, step: int | None = None) -> dict[str, Any]:
        """Take the newest complete checkpoint (or that of a step) of any stage and device count; returns its record."""
        with self._checkpointer(directory) as checkpointer:
            restored = checkpointer.restore(self.targets(), step)
        self.load(restored.arrays)
        return restored.record

    def _settled(self, result: Any) -> Any:
        """A program's result, on CPUs only once it is there. A loop that reads no results piles up programs, and with
        32 of them under way fake devices wait for each other until XLA aborts the process (measured on jax 0.10.2)."""
        return jax.block_until_ready(result) if self.mesh.devices.flat[0].platform == "cpu" else result

    def _checkpointer(self, directory: str | Path, keep_last: int | None = None) -> "closing[Checkpointer]":
        return closing(Checkpointer(Path(directory), keep_last=keep_last, keep_best=None, asynchronous=False))

    @property
    def _live_state(self) -> TrainState:
        # Several devices given a consumed array end the process instead of raising (jax 0.10.2, CPU).
        if any(array.is_deleted() for array in jax.tree.leaves(self.state)):
            raise UserError(
                "engine.state was consumed by a later step, which reuses its memory. Keep engine.params(), "
                "engine.model() or a saved checkpoint instead of a state from before a step."
            )
        return self.state

    def _train_step(self, num_micro_batches: int) -> Any:
        if num_micro_batches not in self._train_steps:
            self._train_steps[num_micro_batches] = self._blueprint.train_step(num_micro_batches)
        return self._train_steps[num_micro_batches]


def _warn_of_lost_updates(precision: PrecisionConfig) -> None:
    if precision.params == "bfloat16" and precision.master is None:
        warnings.warn(
            "precision.master = null with precision.params = bfloat16: an update below 1/256 of a weight rounds "
            "to nothing; precision.master: float32 keeps it",
            stacklevel=4,  # the caller of `initialize`
        )


def _assert_only_clips(config: OptimizerConfig) -> None:
    """Raise ConfigError for a setting that the user's own optimizer leaves no say; clip_norm is the step's."""
    changed = config.model_dump(exclude_defaults=True, exclude={"clip_norm"})
    for name, value in changed.items():
        raise ConfigError(
            f"optimizer.{name} = {value}: has no say, since an optimizer was given; set it there and drop it here "
            "(optimizer.clip_norm alone holds for any optimizer)"
        )


def _accumulates(train: TrainConfig, mesh: Mesh) -> bool:
    """Whether the configured batch is cut into micro-batches. The default size is not asked of who owns the loop."""
    if "global_batch_size" not in train.model_fields_set:
        return train.micro_batch_size is not None or (train.accumulation_steps or 1) > 1
    return _accumulation(train, mesh) > 1


def _accumulation(train: TrainConfig, mesh: Mesh) -> int:
    return plan_batch(train, _num_batch_shards(mesh)).accumulation_steps


def _num_batch_shards(mesh: Mesh) -> int:
    return mesh.shape["replica"] * mesh.shape["data"]


def _narrow(x: Any) -> np.ndarray:
    """The array in the dtype JAX keeps it in. Integers that do not fit would wrap around without a word."""
    array = np.asarray(x)
    if array.dtype.kind not in "biufcV":  # V: bfloat16 and its like
        raise DataError(f"the batch holds an array of {array.dtype}; JAX takes numbers only.")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype != dtype and jnp.issubdtype(dtype, jnp.integer) and array.size:
        low, high = array.min(), array.max()
        if low < jnp.iinfo(dtype).min or high > jnp.iinfo(dtype).max:
            raise DataError(f"the batch holds {array.dtype} from {low} to {high}, and JAX keeps {dtype}: out of range.")
    return array.astype(dtype, copy=False)


def _rows(batch: Any) -> int:
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        raise ConfigError(
            f"the arrays of a batch have leading dimensions {sorted(sizes)}; they must be one and the same."
        )
    return sizes.pop()[0]
