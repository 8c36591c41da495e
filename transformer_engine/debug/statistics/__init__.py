"""Statistics of tensors: one buffer a device, one copy a step, formatted when it has arrived."""
