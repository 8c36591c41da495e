"""Statistics of tensors: one buffer per device, copied to the host once per step."""
