"""Public names of the debugger that programs import from this package."""
