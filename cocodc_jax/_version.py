"""The version of what is installed; it stands once, in `pyproject.toml`."""

from importlib.metadata import version

__version__ = version("cocodc_jax")
