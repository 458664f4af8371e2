"""What the emulator has to say about a kernel."""


class EmulatorError(Exception):
    """Something is wrong with a kernel, or with how it was launched."""


class CompileError(EmulatorError):
    """The source is not Metal, or not what the emulator knows of it."""


class KernelError(EmulatorError):
    """A kernel did what it must not do while it ran."""
