"""ZeRO for JAX: sharded training of unchanged Flax models and plain functions.

Public names are resolved on first use, so that `import jzero` starts no backend and imports no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jzero.auditing import Audit as Audit
    from jzero.auditing import audit as audit
    from jzero.config import Config as Config
    from jzero.config import load_config as load_config
    from jzero.data import OwnData as OwnData
    from jzero.engine import Engine as Engine
    from jzero.engine import initialize as initialize
    from jzero.errors import JzeroError as JzeroError
    from jzero.errors import UserError as UserError
    from jzero.gathered import gather as gather
    from jzero.loss import WeightedLoss as WeightedLoss
    from jzero.loss import cross_entropy as cross_entropy
    from jzero.model_function import Function as Function
    from jzero.model_linen import Linen as Linen
    from jzero.plan import Plan as Plan
    from jzero.plan import make_plan as make_plan
    from jzero.trainer import run_training as run_training

_HOMES = {
    "Audit": "auditing",
    "audit": "auditing",
    "Config": "config",
    "load_config": "config",
    "OwnData": "data",
    "Engine": "engine",
    "initialize": "engine",
    "JzeroError": "errors",
    "UserError": "errors",
    "WeightedLoss": "loss",
    "cross_entropy": "loss",
    "Function": "model_function",
    "Linen": "model_linen",
    "Plan": "plan",
    "make_plan": "plan",
    "run_training": "trainer",
    "gather": "gathered",
}

__all__ = [
    "Audit",
    "Config",
    "Engine",
    "Function",
    "JzeroError",
    "Linen",
    "OwnData",
    "Plan",
    "UserError",
    "WeightedLoss",
    "__version__",
    "audit",
    "cross_entropy",
    "gather",
    "initialize",
    "load_config",
    "make_plan",
    "run_training",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jzero' has no attribute {name!r}")
    return getattr(import_module(f"jzero.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
