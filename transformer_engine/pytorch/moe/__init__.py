"""Mixture of experts: routing, and the order of tokens."""
