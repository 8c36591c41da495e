"""Native operations as Python functions: each allocates its outputs and makes one `_C` call.

One module per op family. Nothing here knows modules, recipes or autograd; every function also works
under `torch.compile`, as a `torch.ops.te` operator (see `library.py`).
"""

from transformer_engine import _C, _env

for _library in ("CUBLASLT", "CUDNN", "NCCL"):
    _C.set_library_path(_library, _env.library_path(_library))
