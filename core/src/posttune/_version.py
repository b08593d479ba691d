"""The version, in one place. ``API`` follows core's major.minor; plugins require a range of it."""

__version__ = "0.1.0"
API = ".".join(__version__.split(".")[:2])
