"""Chains of stages: what modules are made of, and how they run."""
