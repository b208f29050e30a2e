"""The exception tree. One class per kind of user mistake; a message names the field, its value, the other number
and the fix. `exit_code` is what a command line tool returns: 2 for the user's mistakes, 1 for everything else."""


class JzeroError(Exception):
    """Base of everything jzero raises on purpose."""

    exit_code = 1


class UserError(JzeroError):
    """Something the caller can mend; the message says how."""

    exit_code = 2


class ConfigError(UserError):
    """A config file, override or field that cannot be used. Lists every fault found, one a line."""


class MeshError(UserError):
    """Axis sizes that do not fit the devices."""


class PlanError(UserError):
    """A parameter that cannot be placed as asked."""


class ModelError(UserError):
    """A model, loss or optimizer that jzero cannot drive, by parameter name."""


class CollectivesError(UserError):
    """What the gradient engine that was asked for cannot do; names the one that can."""


class DataError(UserError):
    """Input text that is missing, unreadable or too small; names file, line and byte where there is one."""


class CheckpointError(UserError):
    """A checkpoint that does not fit the model, or a directory that cannot be used."""


class AuditError(UserError):
    """A compiled step that does otherwise than its plan, where `log.audit: error` asks to be stopped by that."""


class OutOfMemoryError(UserError, MemoryError):
    """A device's memory that does not hold a program; says whose bytes lie there and what would take fewer."""


class NonFiniteError(JzeroError):
    """Too many steps in a row were skipped because gradients or loss were not finite."""
