"""Names of the debugger that programs import from here."""
