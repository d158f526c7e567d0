"""The project's one error tree.

Classes follow the caller's decision: fix the request, add hardware or relax a limit, measure first or for longer,
wait, or look at the engine. Each message says what was asked, what is true, and what to change. Anything else that
is raised is a bug and keeps its traceback. It lives here because this is the package every other one may import.
"""

from __future__ import annotations

__all__ = [
    "BadInputError",
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "ConflictError",
    "EngineError",
    "InfeasibleError",
    "IserveError",
    "MissingExtraError",
    "NoAnswerError",
    "NotFoundError",
    "NotMeasuredError",
    "PolicyError",
    "SilentEngineError",
    "StateUnavailableError",
    "TooLittleTimeError",
    "UnavailableError",
    "UnmeasurableError",
    "UnsupportedAdapterError",
    "UnsupportedModelError",
    "error_class",
]


class IserveError(Exception):
    """Base of every error that is shown to the user as one line."""


class BadInputError(IserveError):
    """The request is wrong as written; change it."""


class ConfigError(BadInputError):
    """A setting, option or config.json field has a value that cannot be used."""


class CheckpointError(BadInputError):
    """A checkpoint's files are missing, truncated, contradictory, or of a kind that is never loaded (pickle)."""


class UnsupportedModelError(BadInputError):
    """The model is of a family or task that iServe does not serve."""


class UnsupportedAdapterError(BadInputError):
    """The adapter changes a model in a way that iServe does not compute; the message names it, and the way out."""


class MissingExtraError(BadInputError):
    """The request needs an optional dependency that is not installed; the message says what to install."""


class NotFoundError(BadInputError):
    """The named model, deployment, file or GPU is not there."""


class ConflictError(IserveError):
    """Someone else holds it already: a name, a port, the state folder."""


class InfeasibleError(IserveError):
    """Error: no configuration meets the request on the hardware there is; relax a limit or add GPUs."""


class NotMeasuredError(IserveError):
    """A number that the answer needs has not been measured; measure it first, or again where it was too noisy."""


class TooLittleTimeError(NotMeasuredError):
    """The time given was too short to measure it; give more, or try again on a machine with less other work."""


class UnmeasurableError(NotMeasuredError):
    """A measurement that no time is enough for; the message says what to change."""


class PolicyError(IserveError):
    """A policy that was plugged in raised, or answered what it must not; the message names it, and when."""


class UnavailableError(IserveError):
    """A part of iServe is away or busy; trying again later can help."""


class BusyError(UnavailableError):
    """Too many requests wait already; the same request can succeed after a pause, with nothing changed."""


class NoAnswerError(UnavailableError):
    """A process of iServe gave no answer that can be read: the request may have been carried out, or not."""


class StateUnavailableError(UnavailableError):
    """The controller's database is away: nothing is known to have been kept or lost."""


class EngineError(IserveError):
    """An inference engine could not start, failed, or broke its promises; the message quotes its log."""


class SilentEngineError(UnavailableError, EngineError):
    """The Python of an engine does not answer now (a cold disk, a late mount): what it has is not known."""


def error_class(name: object, default: type[IserveError]) -> type[IserveError]:
    """Return the class that another process named in its answer; ``default`` where it is none of these."""
    named = globals().get(str(name))
    return named if isinstance(named, type) and issubclass(named, IserveError) else default
