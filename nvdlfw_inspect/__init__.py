"""Looks inside transformer layers while they run: `nvdlfw_inspect.api` is the way in."""

__version__ = "0.2.3"
