"""Mixture of experts: routing of tokens, and sorting them by expert and back."""
