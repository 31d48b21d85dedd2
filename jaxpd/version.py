"""The version, in the one place that packaging, the command line and the server read it from."""

__version__ = "0.1.0"
