"""Quantizers of recipes: one file for each."""
