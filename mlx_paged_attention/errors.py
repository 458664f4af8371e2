"""The errors a caller may catch. Every one carries a message a person can act on."""


class MlxPagedError(Exception):
    """Base class of every error this package raises on purpose."""


class InvalidRequestError(MlxPagedError, ValueError):
    """A request or an option cannot be served as asked; the message names the field.

    Attributes:
        param: the name of the offending field, or ``None``.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLongError(InvalidRequestError):
    """The prompt, or prompt and answer together, can never fit; both numbers are in the message."""


class ModelLoadError(MlxPagedError):
    """A model's files are missing, damaged or cannot be fetched."""


class UnsupportedModelError(ModelLoadError):
    """The model's architecture or number format cannot be run exactly; the message says why."""


class RequestFailedError(MlxPagedError, RuntimeError):
    """The step that computed this request raised; the message names the cause. Others go on."""


class FormFailedError(RequestFailedError):
    """The form that an answer was to have could not be followed to its end. Others go on."""


class PoolMemoryError(MlxPagedError, MemoryError):
    """The KV pool could not grow: there is no memory for it now. It keeps the size it has."""


class EngineBusyError(MlxPagedError, RuntimeError):
    """What was asked for needs an engine that serves nobody, and requests are being served."""


class EngineDeadError(MlxPagedError, RuntimeError):
    """The engine thread has stopped; the message names the cause. No request can be served."""
