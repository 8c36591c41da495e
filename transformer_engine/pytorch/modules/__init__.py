"""The modules, one file each."""
