"""Looks inside transformer layers while they run. For now the package only carries its version."""

__version__ = "0.2.3"
