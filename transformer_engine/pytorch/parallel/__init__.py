"""Process groups, and what runs across them."""
