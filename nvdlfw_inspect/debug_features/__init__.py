"""The features of the namespace `base`, which the program calls, not the layers."""
