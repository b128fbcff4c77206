"""The one place where the version is written; the build reads this file."""

__version__ = "0.1.0"
