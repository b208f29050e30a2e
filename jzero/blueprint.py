"""All that makes an engine but its arrays: what the user brings, checked, planned and ready to compile."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import ScheduleFreeState

from jzero.adam8bit import Adam8bitState
from jzero.adapt import adapt
from jzero.collectives import Collectives, choose_collectives
from jzero.config import Config, OptimizerConfig, PrecisionConfig, TrainConfig, make_config, plan_batch
from jzero.elementwise import assert_drivable, is_elementwise
from jzero.errors import CollectivesError, ConfigError, ModelError
from jzero.grads import GradFn, Loss
from jzero.grads_explicit import explicit_points, make_explicit_grad_fn
from jzero.grads_xla import make_xla_grad_fn, xla_points
from jzero.gradstats import norm_groups
from jzero.leaf import LeafPlan, map_leaves
from jzero.mesh import BATCH_AXES, AnyMesh, Device, abstract_mesh, batch_shards, make_mesh
from jzero.model_api import Model
from jzero.optim import averaged_weights, make_optimizer
from jzero.plan import Plan, make_plan, trainable
from jzero.rounding import widened
from jzero.runtime import start
from jzero.schedules import make_schedule
from jzero.scopes import GRADIENTS, scope
from jzero.state import TrainState, plan_tree, shardings, weights_of
from jzero.step import make_eval_step, make_train_step
from jzero.usepoint import UsePoint


def prepare(
    model: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation | None = None,
    config: Mapping[str, Any] | str | Path | Config | None = None,
    devices: Sequence[Device] | int | None = None,
) -> "Blueprint":
    """What `initialize` builds its engine from, with nothing placed.

    devices: absent ones (`jzero.mesh.topology`) will do, to compile for. A number of them, to plan and trace only.
    """
    config = make_config(config)
    if not callable(loss):
        raise ModelError(
            f"loss is {loss!r}: give a function loss(model, batch) that returns a scalar or a WeightedLoss."
        )
    _warn_of_lost_updates(config.precision)
    start(config.runtime)
    mesh = abstract_mesh(config.mesh, devices) if isinstance(devices, int) else make_mesh(config.mesh, devices)
    _accumulates(config.train, mesh)  # refuses batches that cannot be cut so, before the model is looked at
    adapted = adapt(model)
    trained = {path: adapted.params[path] for path in trainable(adapted.params, config.train.frozen)}
    schedule = None
    if optimizer is not None:
        _assert_only_clips(config.optimizer)
        assert_drivable(optimizer, {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in trained.items()})
    else:
        schedule = make_schedule(config.optimizer, config.train.num_steps)
        optimizer = make_optimizer(config.optimizer, config.train.num_steps, trained)
    return _planned(config, mesh, adapted, loss, optimizer, schedule)


def _planned(
    config: Config,
    mesh: AnyMesh,
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule | None,
) -> "Blueprint":
    accumulating = _accumulates(config.train, mesh)
    plan = make_plan(
        model.params,
        dict(mesh.shape),
        config.zero,
        config.precision,
        optimizer,
        model.model_state,
        accumulating=accumulating,
        frozen=config.train.frozen,
        ema=config.train.ema_decay is not None,
    )
    _assert_storable(config, plan)
    choose_collectives(config, plan, accumulating=accumulating)  # refuses what cannot be
    groups = norm_groups(config.log.grad_norms, plan.gradients)
    return Blueprint(config, mesh, model, loss, optimizer, schedule, plan, groups)


@dataclass(frozen=True)
class Blueprint:
    """All that makes an engine but its arrays."""

    config: Config
    mesh: AnyMesh
    model: Model
    loss: Loss
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    plan: Plan
    norm_groups: Mapping[str, Sequence[str]]

    @cached_property
    def points(self) -> dict[str, UsePoint]:
        """Over global arrays: those of evaluation, whichever engine trains."""
        return xla_points(self.plan, self.mesh)

    @cached_property
    def elementwise(self) -> bool:
        plans = self.plan.weights.items()
        return is_elementwise(
            self.optimizer, {p: jax.ShapeDtypeStruct(w.stored_shape, widened(w.dtype)) for p, w in plans}
        )

    def replanned(self, config: Config) -> "Blueprint":
        """The same model, loss and optimizer on as many devices that are not there, to plan and trace. config: of
        another `zero`, `mesh`, `precision` or cut of the batch."""
        mesh = abstract_mesh(config.mesh, self.mesh.size)
        return _planned(config, mesh, self.model, self.loss, self.optimizer, self.schedule)

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def collectives(self, num_micro_batches: int | None = None) -> Collectives:
        """Which engine a step over that many micro-batches takes; None: over as many as the config says."""
        accumulating = (
            _accumulates(self.config.train, self.mesh) if num_micro_batches is None else num_micro_batches > 1
        )
        return choose_collectives(self.config, self.plan, accumulating=accumulating)

    def grad_fn(self, engine: str, num_micro_batches: int) -> GradFn:
        """The gradient function of an engine, to be called under jit."""
        return jax.named_scope(scope(GRADIENTS, engine))(self._grad_fn(engine, num_micro_batches))

    def _grad_fn(self, engine: str, num_micro_batches: int) -> GradFn:
        if engine == "xla":
            return make_xla_grad_fn(self.model, self.loss, self.plan, self.mesh, self.points, num_micro_batches)
        points = explicit_points(self.plan, self.mesh)
        by_node = self.config.zero.group == "node"
        return make_explicit_grad_fn(
            self.model, self.loss, self.plan, self.mesh, points, num_micro_batches, by_node=by_node
        )

    def train_step(self, num_micro_batches: int, batch: Any) -> Any:
        """The jitted step over a batch of (abstract) arrays in that many micro-batches: (state, batch) -> (state,
        metrics)."""
        engine = self.collectives(num_micro_batches).engine
        step = self._train_step(engine, num_micro_batches)
        if engine == "xla" or self.config.zero.collectives != "auto":
            return step
        try:
            step.trace(self.abstract_state(), self._abstract_batch(batch))
        except CollectivesError as refusal:
            if self.config.precision.reduces_otherwise:
                raise
            warnings.warn(f"zero.collectives = auto takes xla: {refusal}", stacklevel=2)
            return self._train_step("xla", num_micro_batches)
        return step

    def _train_step(self, engine: str, num_micro_batches: int) -> Any:
        return make_train_step(
            self.grad_fn(engine, num_micro_batches),
            self.optimizer,
            self.plan,
            self.mesh,
            elementwise=self.elementwise,
            clip_norm=self.config.optimizer.clip_norm,
            schedule=self.schedule,
            loss_scale=self.config.loss_scale,
            ema_decay=self.config.train.ema_decay,
            seed=self.config.train.seed,
            stochastic_rounding=self.config.precision.stochastic_rounding,
            norm_groups=self.norm_groups,
            histogram=self.config.log.grad_histogram,
        )

    def eval_step(self, num_micro_batches: int, averaged: bool) -> Any:
        """The jitted evaluation of a batch in that many parts: (state, batch) -> metrics."""
        params_of = partial(self.params_of, averaged=averaged)
        return make_eval_step(self.model, self.loss, self.points, self.mesh, num_micro_batches, params_of)

    def average(self, state: TrainState) -> dict[str, Any]:
        """The averaged weights, in stored shapes: their moving average, or what a schedule-free optimizer means to be
        used; empty where there are none."""
        return state.ema or averaged_weights(state.opt_state, weights_of(state, self.plan)) or {}

    @cached_property
    def has_average(self) -> bool:
        return bool(jax.eval_shape(self.average, self.abstract_state()))

    def params_of(self, state: TrainState, averaged: bool) -> dict[str, Any]:
        """The parameters that a model reads, as they lie at rest. averaged: those trained from their average."""
        average = self.average(state) if averaged else {}
        at_rest = {path: NamedSharding(self.mesh, self.plan.params[path].spec) for path in average}
        narrow = {path: x.astype(self.plan.params[path].dtype) for path, x in average.items()}
        return state.params | jax.lax.with_sharding_constraint(narrow, at_rest)

    def abstract_state(self) -> TrainState:
        """The state in shapes and placements only."""
        return map_leaves(
            lambda leaf, placement: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype, sharding=placement),
            plan_tree(self.plan),
            shardings(self.plan, self.mesh),
        )

    def trace_step(self, batch: Any) -> jax.stages.Traced:
        """The training step for a batch of (abstract) arrays as a program before compilation."""
        step = self.train_step(self.micro_batches(batch), batch)
        return step.trace(self.abstract_state(), self._abstract_batch(batch))

    def lower_step(self, batch: Any) -> jax.stages.Lowered:
        """The training step for a batch of (abstract) arrays, lowered, to look at or compile."""
        return self.trace_step(batch).lower()

    def program(self, batch: Any) -> "TrainProgram":
        """The training step for a batch of (abstract) arrays, compiled."""
        traced = self.trace_step(batch)
        return TrainProgram(self, self.micro_batches(batch), traced, traced.lower().compile())

    def _abstract_batch(self, batch: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding), batch)

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
        train, rows = self.config.train, self.check_rows(batch) // batch_shards(self.mesh.shape)
        wanted = -(-rows // train.micro_batch_size) if train.micro_batch_size else train.accumulation_steps or 1
        return next(parts for parts in range(min(wanted, rows), rows + 1) if rows % parts == 0)

    def check_rows(self, batch: Any) -> int:
        """The rows of a batch. Raises ConfigError unless they divide over the devices of the batch axes."""
        rows, shards = _rows(batch), batch_shards(self.mesh.shape)
        if rows == 0:
            raise ConfigError("the batch has no rows.")
        if rows % shards:
            raise ConfigError(
                f"the batch has {rows} rows, which do not divide over {shards} devices of the batch axes "
                f"(replica x data); give {rows - rows % shards or shards} or {rows + -rows % shards}."
            )
        return rows


@dataclass(frozen=True)
class TrainProgram:
    """A training step: what it is made from, over how many micro-batches, as traced and as compiled.
    compiled(state, batch) -> (state, metrics); the given state is consumed."""

    blueprint: Blueprint
    num_micro_batches: int
    traced: jax.stages.Traced
    compiled: jax.stages.Compiled


def _warn_of_lost_updates(precision: PrecisionConfig) -> None:
    bits = {"bfloat16": 8, "float16": 11}.get(precision.params)
    if bits and precision.master in (None, precision.params) and not precision.stochastic_rounding:
        warnings.warn(
            f"precision.master = {precision.master or 'null'} with precision.params = {precision.params}: an update "
            f"below 1/{2**bits} of a weight rounds to nothing; precision.master: float32 keeps it",
            stacklevel=4,  # the caller of `initialize`
        )


def _assert_storable(config: Config, plan: Plan) -> None:
    """Raise ConfigError for dtypes and averages that this optimizer's state, whoever made it, cannot bear."""
    kinds = (ScheduleFreeState, Adam8bitState)
    leaves = jax.tree.leaves(plan.optimizer, is_leaf=lambda x: isinstance(x, (*kinds, LeafPlan)))
    moments, schedule_free = config.precision.moments, any(isinstance(leaf, ScheduleFreeState) for leaf in leaves)
    if moments and any(isinstance(leaf, kinds) for leaf in leaves):
        held = "state holds the weights themselves" if schedule_free else "moments rest in 8 bits"
        raise ConfigError(f"precision.moments = {moments}: this optimizer's {held}; set precision.moments: null")
    if moments and not any(leaf.shape for leaf in leaves):
        raise ConfigError(f"precision.moments = {moments}: this optimizer keeps no arrays; set precision.moments: null")
    if schedule_free and plan.ema:
        raise ConfigError(
            f"train.ema_decay = {config.train.ema_decay}: a schedule-free optimizer keeps an average of its own; "
            "set train.ema_decay: null"
        )
    if schedule_free and any(leaf.dtype != jnp.float32 for leaf in plan.weights.values()):
        raise ConfigError(
            f"precision.master = {config.precision.master or 'null'}: a schedule-free optimizer averages the weights, "
            f"which {config.precision.params} is too coarse for; set precision.master: float32"
        )


def _assert_only_clips(config: OptimizerConfig) -> None:
    """Raise ConfigError for a setting that the user's own optimizer leaves no say; clip_norm is the step's."""
    changed = config.model_dump(exclude_defaults=True, exclude={"clip_norm"})
    for name, value in changed.items():
        raise ConfigError(
            f"optimizer.{name} = {value}: has no say, since an optimizer was given; set it there and drop it here "
            "(optimizer.clip_norm alone holds for any optimizer)"
        )


def _accumulates(train: TrainConfig, mesh: AnyMesh) -> bool:
    """Whether the configured batch is cut into micro-batches. The default size is not asked of who owns the loop."""
    if "global_batch_size" not in train.model_fields_set:
        return train.micro_batch_size is not None or (train.accumulation_steps or 1) > 1
    return _accumulation(train, mesh) > 1


def _accumulation(train: TrainConfig, mesh: AnyMesh) -> int:
    return plan_batch(train, batch_shards(mesh.shape)).accumulation_steps


def _rows(batch: Any) -> int:
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        raise ConfigError(
            f"the arrays of a batch have leading dimensions {sorted(sizes)}; they must be one and the same."
        )
    return sizes.pop()[0]
