"""The version of zckpt, for the package, its build and the reports."""

__version__ = "0.1.0"
