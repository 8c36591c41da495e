"""Masks, which say which keys a query sees, and the bias of ALiBi."""
