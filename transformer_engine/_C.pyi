# Written by tools/make_stub.py. Each operation writes into tensors that the caller has allocated:
# shapes, dtypes and meaning are those of csrc/ops/<op>.h; transformer_engine.pytorch.kernels holds
# the callers.
from collections.abc import Sequence

import torch

class Recorder:
    def __init__(self) -> None: ...
    def addresses(self) -> list[list[int]]: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...

class Recording:
    def __init__(
        self,
        inputs: Sequence[torch.Tensor | None],
        allocations: Sequence[tuple | None],
        allocators: Sequence[object],
        persistent: list,
    ) -> None: ...
    def place(self, recorder: Recorder, addresses: list, uses: list) -> str: ...
    def run(self, inputs: list) -> list | None: ...

def _nop(a: torch.Tensor | None, b: torch.Tensor | None, c: torch.Tensor | None) -> None: ...
def activation_backward(
    dy: torch.Tensor | None,
    x: torch.Tensor | None,
    kind: int,
    dx: torch.Tensor | None,
    format: int,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    scales: torch.Tensor | None,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    current_scales: torch.Tensor | None,
    power_of_2: bool,
    epsilon: float,
    dbias: torch.Tensor | None,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    limit: float = 7.0,
    alpha: float = 1.7020000219345093,
    offset: float = 1.0,
    again: torch.Tensor | None = None,
    again_scales: torch.Tensor | None = None,
    again_format: int = 5,
    again_rounded: bool = False,
) -> None: ...
def activation_forward(
    x: torch.Tensor | None,
    kind: int,
    y: torch.Tensor | None,
    format: int,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    scales: torch.Tensor | None,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    current_scales: torch.Tensor | None,
    power_of_2: bool,
    epsilon: float,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    limit: float = 7.0,
    alpha: float = 1.7020000219345093,
    offset: float = 1.0,
) -> None: ...
def activation_takes_moments(x: torch.Tensor | None, dy: torch.Tensor | None = None) -> bool: ...
def adam(
    parameters: Sequence[torch.Tensor | None],
    means: Sequence[torch.Tensor | None],
    squares: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor | None],
    amaxes: Sequence[torch.Tensor | None],
    step: torch.Tensor | None,
    rate: torch.Tensor | None,
    factor: torch.Tensor | None,
    rules: tuple[float, float, float, float, bool],
) -> None: ...
def amax(
    x: torch.Tensor | None,
    amax: torch.Tensor | None,
    scales: torch.Tensor | None,
    format: int,
    power_of_2: bool,
    epsilon: float,
) -> None: ...
def attention_backward(
    inputs: Sequence[torch.Tensor | None],
    settings: Sequence[int],
    scale: float,
    dropout: float,
    sequences: Sequence[torch.Tensor | None],
    extras: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
) -> None: ...
def attention_forward(
    inputs: Sequence[torch.Tensor | None],
    settings: Sequence[int],
    scale: float,
    dropout: float,
    sequences: Sequence[torch.Tensor | None],
    extras: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor | None],
) -> None: ...
def attention_graph_count() -> int: ...
def attention_refusal(
    sizes: Sequence[Sequence[int]],
    dtype: int,
    device: int,
    settings: Sequence[int],
    dropout: float,
    padded: bool,
    bias: Sequence[int],
    bias_grad: bool,
    sink: bool,
    sink_grad: bool,
    training: bool,
) -> str: ...
def built_with_cuda() -> bool: ...
def cast(
    x: torch.Tensor | None,
    y: torch.Tensor | None,
    factor: torch.Tensor | None = None,
) -> None: ...
def cast_moments(
    x: torch.Tensor | None,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    format: int,
    row: torch.Tensor | None,
    active: torch.Tensor | None,
    squared_error: bool = True,
) -> None: ...
def cast_statistics(row: Sequence[float]) -> dict[str, float]: ...
def cross_entropy_backward(
    logits: torch.Tensor | None,
    labels: torch.Tensor | None,
    log_sums: torch.Tensor | None,
    factors: torch.Tensor | None,
    smoothing: float,
    evenly: float,
    dx: torch.Tensor | None,
) -> None: ...
def cross_entropy_forward(
    logits: torch.Tensor | None,
    labels: torch.Tensor | None,
    sums: torch.Tensor | None,
) -> None: ...
def cuda_device_count() -> int: ...
def delayed_scaling_update(
    table: torch.Tensor | None,
    reduced: torch.Tensor | None,
    most_recent: bool,
    fp8_max: float,
    margin: int,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None: ...
def dequantize(
    codes: torch.Tensor | None,
    format: int,
    scales: torch.Tensor | None,
    x: torch.Tensor | None,
) -> None: ...
def describe(tensor: torch.Tensor | None) -> dict: ...
def device_limits(index: int) -> dict: ...
def device_limits_of(
    capability: int,
    code: int,
    multiprocessors: int,
    shared_bytes: int,
    fp8_products: bool = True,
    clusters: bool = True,
    dependent_launch: bool = True,
    shared_bytes_allowed: int = 0,
) -> dict: ...
def dropout_add_backward(
    dout: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    dx: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None: ...
def dropout_add_forward(
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    out: torch.Tensor | None,
) -> None: ...
def enable_exchange_api(enabled: bool) -> None: ...
def exchange_api_enabled() -> bool: ...
def fp8_attention_backward(
    inputs: Sequence[torch.Tensor | None],
    settings: Sequence[int],
    scale: float,
    results: Sequence[torch.Tensor | None],
    fp8: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    format: int,
) -> None: ...
def fp8_attention_forward(
    inputs: Sequence[torch.Tensor | None],
    settings: Sequence[int],
    scale: float,
    results: Sequence[torch.Tensor | None],
    fp8: Sequence[torch.Tensor | None],
) -> None: ...
def fp8_attention_refusal(
    sizes: Sequence[Sequence[int]],
    device: int,
    settings: Sequence[int],
    statistics: bool,
    format: int | None,
) -> str: ...
def gather_amax(
    table: torch.Tensor | None,
    reduced: torch.Tensor | None,
    most_recent: bool,
    out: torch.Tensor | None,
) -> None: ...
def gemm(
    d: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    a_scales: torch.Tensor | None,
    b_scales: torch.Tensor | None,
    a_format: int,
    b_format: int,
    a_transposed: bool,
    b_transposed: bool,
    accumulate: bool,
    fast_accumulation: bool,
    bias: torch.Tensor | None,
    bias_grad: torch.Tensor | None,
    activation: int,
    aux: torch.Tensor | None,
    allow_tf32: bool,
) -> bool: ...
def gemm_algorithm() -> list[int]: ...
def gemm_guesses(limit: int) -> list[list[int]]: ...
def gemm_neighbours(algorithm: Sequence[int]) -> list[list[int]]: ...
def gemm_plan_count() -> int: ...
def gemm_problem() -> str: ...
def gemm_use(algorithm: Sequence[int]) -> bool: ...
def gemm_use_guess() -> None: ...
def is_recording() -> bool: ...
def left_out() -> list[tuple[str, str, str]]: ...
def merge_attention(
    out: torch.Tensor | None,
    log_sum_exp: torch.Tensor | None,
    part: torch.Tensor | None,
    part_log_sum_exp: torch.Tensor | None,
) -> None: ...
def merge_rows(
    rows: torch.Tensor | None,
    kinds: torch.Tensor | None,
    into: torch.Tensor | None,
    active: torch.Tensor | None,
) -> None: ...
def moments(
    x: torch.Tensor | None,
    row: torch.Tensor | None,
    active: torch.Tensor | None,
) -> None: ...
def norm_backward(
    dy: torch.Tensor | None,
    x: torch.Tensor | None,
    gamma: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    kind: int,
    zero_centered: bool,
    residual_grad: torch.Tensor | None,
    dx: torch.Tensor | None,
    dgamma: torch.Tensor | None,
    dbeta: torch.Tensor | None,
) -> None: ...
def norm_forward(
    x: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    kind: int,
    epsilon: float,
    zero_centered: bool,
    y: torch.Tensor | None,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    scales: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    format: int,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    current: bool,
    amax_epsilon: float,
    power_of_2: bool,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> None: ...
def norm_takes_moments(
    x: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
) -> bool: ...
def num_threads() -> int: ...
def one_shot(
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    memory: torch.Tensor | None,
    group: torch.Tensor | None,
    scatters: bool,
    combine: int,
) -> None: ...
def one_shot_header(ranks: int) -> int: ...
def one_shot_most_ranks() -> int: ...
def peer_receive(device: int, arrived: int, stream: int) -> None: ...
def peer_release(device: int, free: int, stream: int) -> None: ...
def peer_send(x: torch.Tensor | None, to: int, free: int, arrived: int, stream: int) -> None: ...
def quantize(
    x: torch.Tensor | None,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    scales: torch.Tensor | None,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    format: int,
    dbias: torch.Tensor | None = None,
    moments: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> None: ...
def quantize_blocks(
    x: torch.Tensor | None,
    rowwise: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    format: int,
    power_of_2: bool,
    epsilon: float,
    dbias: torch.Tensor | None = None,
) -> None: ...
def rope(
    x: torch.Tensor | None,
    freqs: torch.Tensor | None,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch_first: bool,
    interleaved: bool,
    backward: bool,
    out: torch.Tensor | None,
) -> None: ...
def scale_from_amax(
    amax: torch.Tensor | None,
    scales: torch.Tensor | None,
    format: int,
    power_of_2: bool,
    epsilon: float,
) -> None: ...
def set_device_switches(
    fp8_products: bool,
    clusters: bool,
    dependent_launch: bool,
    shared_bytes: int,
) -> None: ...
def set_gemm_definition(definition: object) -> None: ...
def set_library_path(name: str, path: str) -> None: ...
def set_num_threads(count: int) -> None: ...
def set_workspace_allocators(zeros: object, empty: object) -> None: ...
def softmax_backward(
    dy: torch.Tensor | None,
    y: torch.Tensor | None,
    scale: float,
    dx: torch.Tensor | None,
) -> None: ...
def softmax_forward(
    x: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    left: int,
    right: int,
    diagonal: int,
    y: torch.Tensor | None,
) -> None: ...
def statistics(row: Sequence[float]) -> dict[str, float]: ...
def sum_squares(tensors: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> None: ...
def transpose(
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
) -> None: ...
