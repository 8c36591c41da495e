"""`TransformerLayer`, and what it consists of beside modules and attention."""
