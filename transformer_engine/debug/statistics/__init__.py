"""Built-in statistics of tensors, without waiting for the device.

Kernels merge the moments of each tensor into a row of a buffer on the device. `step()` copies the
rows to the host asynchronously, and a later step computes and logs statistics from them.
"""
