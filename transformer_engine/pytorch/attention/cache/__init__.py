"""Keys and values of earlier tokens, for generation."""
