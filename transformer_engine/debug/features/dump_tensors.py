"""DumpTensors: writes tensors and their FP8 codes to files."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from nvdlfw_inspect import api
from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method
from nvdlfw_inspect.utils import get_distributed_rank
from transformer_engine.debug.features.configuration import TENSORS, Scheduled
from transformer_engine.pytorch.dtypes import FP8_NAMES
from transformer_engine.pytorch.tensor import QuantizedTensor


@Registry.register_feature(namespace="transformer_engine")
class DumpTensors(Scheduled):
    """Write tensors to `LOGDIR/tensor_dumps/rank_R/iter_NNNNNN/LAYER_TENSOR.pt`.

    Characters that file names cannot contain become `_`. If the names of two layers become equal
    in this way, the second layer gets `LAYER_TENSOR_2.pt`, the third one `LAYER_TENSOR_3.pt`, and
    so on; `layer` in the file has the full name. Further micro-batches of a step get names that end
    in `_microbatch1`, `_microbatch2`, ... Tensors of an evaluation (`eval()` under `no_grad`) are
    written only in steps in which the layer is not trained. Files of an earlier run in the same
    `log_dir` are replaced; the debug log says so, once for each layer and tensor.

    Each file holds a dict of plain tensors and numbers, for `torch.load(path, weights_only=True)`:
    `layer`, `tensor`, `iteration`; `high_precision`, the tensor, if requested; `quantized`, if
    requested: a dict with an entry for each of `rowwise` and `columnwise` that exists, itself a
    dict of `codes` (uint8; column-wise codes are transposed), `scale_inv` and `format` ("E4M3" or
    "E5M2"). With block scaling, `scale_inv` has all scales, and `block_dimensions` is 1 or 2.

    Keys:
        high_precision_tensor: True to write the tensor before the cast; default False
        quantized_tensor: True to write its FP8 codes and scales; default False
        tensors / tensors_struct: activation, gradient, weight, output, wgrad, dgrad
        freq, start_step, end_step, start_end_list: in which steps; default: in every step

    Example:
        dump_fc1:
          enabled: True
          layers:
            layer_types: [fc1]
          transformer_engine:
            DumpTensors:
              enabled: True
              tensors: [activation]
              high_precision_tensor: True
              start_step: 100
              end_step: 100
    """

    CONFIG: ClassVar = FeatureConfig(
        keys={"high_precision_tensor": "bool", "quantized_tensor": "bool"},
        tensors=TENSORS,
        scheduled=True,
    )

    def __init__(self) -> None:
        self._written: dict[tuple[str, str], list[Path]] = {}  # in this iteration
        self._trained: set[tuple[str, str]] = set()  # in this iteration
        self._names: dict[str, list[tuple[str, str]]] = {}
        self._iteration = -1
        self._warned: set[str] = set()

    @api_method
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        tensor: torch.Tensor | None,
        iteration: int,
        rowwise_quantized_tensor: torch.Tensor | None = None,
        columnwise_quantized_tensor: torch.Tensor | None = None,
        is_evaluation: bool = False,
    ) -> None:
        """Write one file."""
        manager: Any = api.DEBUG_MANAGER
        if not self._counts((layer_name, tensor_name), iteration, is_evaluation):
            return
        found: dict[str, Any] = {}
        if config.get("high_precision_tensor") and tensor is not None:
            found["high_precision"] = _on_host(tensor)
        if config.get("quantized_tensor"):
            sides = {"rowwise": rowwise_quantized_tensor, "columnwise": columnwise_quantized_tensor}
            codes = {name: _codes(side, name) for name, side in sides.items()}
            codes = {name: side for name, side in codes.items() if side is not None}
            if codes:
                found["quantized"] = codes
        key = f"DumpTensors {layer_name} {tensor_name}"
        if not found:
            if not (config.get("high_precision_tensor") or config.get("quantized_tensor")):
                problem = "expected high_precision_tensor or quantized_tensor:"
                self._warn(problem, "nothing is written")
            manager.log_message(
                f"Feature=DumpTensors, API=inspect_tensor: Nothing to dump for {tensor_name}",
                layer_name,
                once=f"{key} nothing",
            )
            return
        path = self._path(manager, layer_name, tensor_name, iteration)
        folder = path.parents[1]
        manager.log_message(f"TensorLogger initialized. Saving tensors to: {folder}", once="dumps")
        if path.exists():  # of an earlier run, or of this iteration before the program set it back
            text = f"[TE DumpTensors] Overwriting existing dump file: {path}"
            manager.log_message(text, layer_name, once=f"{key} overwritten")
        about = {"layer": layer_name, "tensor": tensor_name, "iteration": iteration}
        if self._write(path, {**about, **found}):
            keys = ", ".join(found)
            manager.log_message(
                f"Feature=DumpTensors, API=inspect_tensor: Dumped {tensor_name} at iteration "
                f"{iteration} (keys: [{keys}])",
                layer_name,
                once=f"{key} {iteration}",
            )

    def _counts(self, key: tuple[str, str], iteration: int, is_evaluation: bool) -> bool:
        """Whether to write the tensor; removes the files of an evaluation when training begins."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._written.clear()
            self._trained.clear()
        if is_evaluation:
            return key not in self._trained
        if key not in self._trained:
            self._trained.add(key)
            for path in self._written.pop(key, ()):
                with suppress(OSError):
                    path.unlink()
        return True

    def _path(self, manager: Any, layer: str, tensor: str, iteration: int) -> Path:
        name = self._name(layer, tensor)
        folder = Path(manager.log_dir) / "tensor_dumps" / f"rank_{get_distributed_rank()}"
        earlier = self._written.setdefault((layer, tensor), [])
        file = f"{name}_microbatch{len(earlier)}.pt" if earlier else f"{name}.pt"
        path = folder / f"iter_{iteration:06d}" / file
        earlier.append(path)
        return path

    def _name(self, layer: str, tensor: str) -> str:
        """A file name that no other tensor of the session has."""
        name = re.sub(r'[/\\:*?"<>| .]', "_", f"{layer}_{tensor}")
        alike = self._names.setdefault(name, [])
        if (layer, tensor) not in alike:
            alike.append((layer, tensor))
        number = alike.index((layer, tensor)) + 1
        return name if number == 1 else f"{name}_{number}"

    def _write(self, path: Path, content: dict[str, Any]) -> bool:
        unfinished = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, unfinished)
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:  # a full disk must not end a training run
            with suppress(OSError):
                unfinished.unlink()
            self._warn("could not write", f"{path}: {error}")
            return False
        return True

    def _warn(self, problem: str, details: str) -> None:
        """Warn of each problem once in a session."""
        if problem not in self._warned:
            self._warned.add(problem)
            warnings.warn(f"[DumpTensors] {problem} {details}", stacklevel=3)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    plain = x.dequantize() if isinstance(x, QuantizedTensor) else x
    return plain.detach().to("cpu", copy=True).contiguous()


def _codes(side: torch.Tensor | None, name: str) -> dict[str, Any] | None:
    matrix = side.side(name != "rowwise") if isinstance(side, QuantizedTensor) else None
    if matrix is None:
        return None
    dimensions = matrix.layout.dimensions
    return {
        "codes": _on_host(matrix.codes),
        "scale_inv": _on_host(matrix.scales if dimensions else matrix.scales.flatten()[:1]),
        "format": FP8_NAMES[matrix.element],
        **({"block_dimensions": dimensions} if dimensions else {}),
    }
