"""The features of the namespace `base`: they are called by hand, not by layers."""
