"""The version of zckpt, for the package, its build and the reports that state it."""

__version__ = "0.1.0"
