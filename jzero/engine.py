"""The engine: a sharded training state and the programs that step, evaluate, save and restore it. For users who own
their loop; the trainer drives one too."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import RenderableType

from jzero.blueprint import Blueprint, TrainProgram, prepare
from jzero.checkpoint import ArrayTarget, Checkpointer
from jzero.config import Config
from jzero.errors import ConfigError, DataError, UserError
from jzero.grads import Loss, bind_params
from jzero.loss_scale import init_loss_scale
from jzero.mesh import Device, platform_of
from jzero.out_of_memory import memory_told
from jzero.report import plan_report
from jzero.state import TrainState, assert_placement, from_named, init_state, init_values, named, plan_tree, shardings
from jzero.step import Metrics
from jzero.warm_start import MODEL_STATE, WarmStart, take_weights


def initialize(
    model: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation | None = None,
    config: Mapping[str, Any] | str | Path | Config | None = None,
    devices: Sequence[Device] | None = None,
) -> "Engine":
    """An engine with a freshly initialised, sharded state.

    model: a function of nnx.Rngs that builds a Flax NNX module (preferred: nothing is ever built whole), a built one,
    whose values are the start, a jzero.Linen or a jzero.Function. loss(model, batch) returns a scalar (a mean over the
    batch's rows), a WeightedLoss, or either with a dict of extra metrics. optimizer: any optax transformation; None
    makes config.optimizer. config: a mapping, a path, a Config, or None for the defaults. devices: None for all.

    Raises a UserError naming the field and the fix for anything that cannot work, before anything is compiled.
    """
    return Engine(prepare(model, loss, optimizer, config, devices))


class Engine:
    """Made by `initialize`. Holds the state; every method leaves it sharded as the plan says."""

    def __init__(self, blueprint: Blueprint):
        assert isinstance(blueprint.mesh, Mesh), "an engine needs devices"
        self.config, self.mesh, self.plan = blueprint.config, blueprint.mesh, blueprint.plan
        self._blueprint = blueprint
        self._programs: dict[Hashable, TrainProgram] = {}  # by the shapes of a batch
        self._ran: set[int] = set()  # which of them have done a step
        self._eval_steps: dict[tuple[int, bool], Any] = {}
        self._applied: dict[tuple[Callable[..., Any], bool], Callable[..., Any]] = {}
        self._start(*init_values(blueprint.model, self.plan, self.mesh, self.config.train.seed))

    @property
    def num_parameters(self) -> int:
        return self.plan.num_parameters

    def step(self, batch: Any) -> Metrics:
        """One optimizer step over a batch of host (or device) arrays whose leading dimension is the global batch.

        Returns float32/int32 device scalars: loss, weight, grad_norm (before clipping), skipped (steps so far that
        changed nothing), skipped_in_a_row, non_finite_leaf (the number in `plan.gradients` of the first leaf that is
        not finite, -1: none), learning_rate where the schedule is jzero's, and the loss's extra metrics. In float16
        also loss_scale, of this step, and loss_scale_exhausted, bool: it overflowed at its minimum, so stop. As
        `config.log` asks, what `jzero.gradstats.gradient_stats` returns.
        """
        self._blueprint.micro_batches(batch)  # refuses a number of rows before they are placed
        state, batch = self._live_state, self.place(batch)
        program = self._program(batch)
        with memory_told(self._blueprint, batch):
            self._settled(state.step)
            self.state, metrics = program.compiled(state, batch)
            if id(program) not in self._ran:  # a lack of memory shows where a result is waited for
                jax.block_until_ready(metrics)
                self._ran.add(id(program))
        return metrics

    def program(self, batch: Any = None) -> TrainProgram:
        """The training step that `step` runs for a batch of (abstract) arrays, compiled once for each shape of batch.
        None: the one that was compiled last. Raises UserError where there is none."""
        if batch is None:
            if not self._programs:
                raise UserError("this engine has not stepped yet, so it has no program: give a batch, or its shapes")
            return list(self._programs.values())[-1]
        self._blueprint.micro_batches(batch)  # refuses what is no batch of arrays, or of other rows
        return self._program(batch)

    def _program(self, batch: Any) -> TrainProgram:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), batch)
        leaves, structure = jax.tree.flatten(abstract)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._programs:
            with memory_told(self._blueprint, abstract):
                self._programs[key] = self._blueprint.program(abstract)
        return self._programs[key]

    @property
    def has_average(self) -> bool:
        """Whether there are averaged weights: `train.ema_decay`, or a schedule-free optimizer."""
        return self._blueprint.has_average

    def evaluate(self, batch: Any, *, averaged: bool = False) -> Metrics:
        """Loss, weight and extra metrics of a batch in evaluation mode (dropout off, running statistics).

        averaged, here and below: of the averaged weights instead of those in training.
        """
        self._assert_average(averaged)
        key = (self._blueprint.evaluation_parts(batch), averaged)
        if key not in self._eval_steps:
            self._eval_steps[key] = self._blueprint.eval_step(*key)
        return self._settled(self._eval_steps[key](self._live_state, self.place(batch)))

    def apply(self, fn: Callable[..., Any], *args: Any, averaged: bool = False) -> Any:
        """fn(model, *args), jitted once per fn, on the sharded parameters in evaluation mode."""
        self._assert_average(averaged)
        if (fn, averaged) not in self._applied:

            def applied(state: TrainState, *args: Any) -> Any:
                params = bind_params(self._blueprint.params_of(state, averaged), self._blueprint.points)
                return fn(
                    self._blueprint.model.bind(params, state.model_state, jnp.zeros(2, jnp.int32), train=False), *args
                )

            self._applied[fn, averaged] = jax.jit(applied)
        return self._settled(self._applied[fn, averaged](self._live_state, *args))

    def place(self, batch: Any) -> Any:
        """A batch of host arrays on the mesh, rows split over the batch axes."""
        sharding = self._blueprint.batch_sharding
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, _narrow(x)), batch)

    def lower_step(self, batch: Any) -> jax.stages.Lowered:
        """The training step for a batch of (abstract) arrays, lowered, to look at or compile."""
        return self._blueprint.lower_step(batch)

    def params(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
        """The weights the optimizer holds (float32 masters where there are any) and the frozen parameters, whole, in
        true shapes, on the host."""
        self._assert_average(averaged)
        state = self._live_state
        weights = state.params | state.master | (self._blueprint.average(state) if averaged else {})
        return {path: leaf.cut(np.asarray(weights[path])) for path, leaf in self.plan.params.items()}

    def model(self, *, averaged: bool = False) -> Any:
        """The user's model holding copies of the current parameters in true shapes, in evaluation mode, to call."""
        self._assert_average(averaged)
        state = self._live_state
        # Copies: the next step consumes the state's own arrays.
        params = jax.tree.map(jnp.copy, jax.jit(partial(self._blueprint.params_of, averaged=averaged))(state))
        params = {path: leaf.cut(params[path]) for path, leaf in self.plan.params.items()}
        model_state = jax.tree.map(jnp.copy, state.model_state)
        return self._blueprint.model.bind(params, model_state, jnp.zeros(2, jnp.int32), train=False)

    def report(self) -> RenderableType:
        """The start-up report: bytes a device by tree, which engine trains, what stayed whole and why."""
        return plan_report(self.plan, self._blueprint.collectives())

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

    def load_weights(
        self, directory: str | Path, step: int | None = None, *, averaged: bool = False, skip: Sequence[str] = ()
    ) -> WarmStart:
        """Start anew from the weights and the model state in a checkpoint (the newest complete one, or that of a step)
        of any stage, device count, optimizer and precision. Optimizer state and counters are as at a start.

        averaged: take its moving average. skip: path patterns of what shall stay as it is here, and of what is to be
        left there. Raises CheckpointError, listing what does not fit otherwise.
        """
        with self._checkpointer(directory) as checkpointer:
            taken, read = take_weights(checkpointer, step, self.plan, self.mesh, averaged=averaged, skip=skip)
        state = self._live_state
        values = {path: read.get(path, state.master.get(path, x)) for path, x in state.params.items()}
        model_state = {path: read.get(f"{MODEL_STATE}{path}", x) for path, x in state.model_state.items()}
        self._start(values, model_state)
        return taken

    def _start(self, values: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
        optimizer, loss_scale = self._blueprint.optimizer, init_loss_scale(self.config.loss_scale)
        self.state = init_state(values, model_state, optimizer, self.plan, self.mesh, loss_scale)
        assert_placement(self.state, self.plan, self.mesh)

    def _assert_average(self, averaged: bool) -> None:
        if averaged and not self.has_average:
            raise ConfigError("train.ema_decay = null: keeps no averaged weights; set it, to 0.999 say")

    def _settled(self, result: Any) -> Any:
        """A program's result, on CPUs only once it is there. A loop that reads no results piles up programs, and with
        32 of them under way fake devices wait for each other until XLA aborts the process (measured on jax 0.10.2)."""
        return jax.block_until_ready(result) if platform_of(self.mesh) == "cpu" else result

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
