# Written by tools/make_stub.py. Each operation writes into tensors that the caller has allocated:
# shapes, dtypes and meaning are those of csrc/ops/<op>.h; transformer_engine.pytorch.kernels holds
# the callers.
from collections.abc import Sequence

from torch import Tensor

class Recorder:
    def __init__(self) -> None: ...
    def addresses(self) -> list[list[int]]: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...

class Recording:
    def __init__(
        self,
        inputs: Sequence[Tensor | None],
        allocations: Sequence[tuple | None],
        allocators: Sequence[object],
        persistent: list,
    ) -> None: ...
    def place(self, recorder: Recorder, addresses: list, uses: list) -> str: ...
    def run(self, inputs: list) -> list | None: ...

def _nop(a: Tensor | None, b: Tensor | None, c: Tensor | None) -> None: ...
def activation_backward(
    dy: Tensor | None,
    x: Tensor | None,
    kind: int,
    dx: Tensor | None,
    format: int,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scales: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    current_scales: Tensor | None,
    power_of_2: bool,
    epsilon: float,
    dbias: Tensor | None,
    moments: Tensor | None = None,
    active: Tensor | None = None,
    limit: float = 7.0,
    alpha: float = 1.7020000219345093,
    offset: float = 1.0,
    again: Tensor | None = None,
    again_scales: Tensor | None = None,
    again_format: int = 5,
    again_rounded: bool = False,
) -> None: ...
def activation_forward(
    x: Tensor | None,
    kind: int,
    y: Tensor | None,
    format: int,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scales: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    current_scales: Tensor | None,
    power_of_2: bool,
    epsilon: float,
    moments: Tensor | None = None,
    active: Tensor | None = None,
    limit: float = 7.0,
    alpha: float = 1.7020000219345093,
    offset: float = 1.0,
) -> None: ...
def activation_takes_moments(x: Tensor | None, dy: Tensor | None = None) -> bool: ...
def adam(
    parameters: Sequence[Tensor | None],
    means: Sequence[Tensor | None],
    squares: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    amaxes: Sequence[Tensor | None],
    step: Tensor | None,
    rate: Tensor | None,
    factor: Tensor | None,
    found_inf: Tensor | None,
    rules: tuple[float, float, float, float, bool],
) -> None: ...
def amax(
    x: Tensor | None,
    amax: Tensor | None,
    scales: Tensor | None,
    format: int,
    power_of_2: bool,
    epsilon: float,
) -> None: ...
def attention_backward(
    inputs: Sequence[Tensor | None],
    settings: Sequence[int],
    scale: float,
    dropout: float,
    sequences: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> None: ...
def attention_forward(
    inputs: Sequence[Tensor | None],
    settings: Sequence[int],
    scale: float,
    dropout: float,
    sequences: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
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
def cast(x: Tensor | None, y: Tensor | None, factor: Tensor | None = None) -> None: ...
def cast_moments(
    x: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    format: int,
    row: Tensor | None,
    active: Tensor | None,
    squared_error: bool = True,
) -> None: ...
def cast_statistics(row: Sequence[float]) -> dict[str, float]: ...
def copy(x: Tensor | None, out: Tensor | None) -> None: ...
def cross_entropy_backward(
    logits: Tensor | None,
    labels: Tensor | None,
    log_sums: Tensor | None,
    factors: Tensor | None,
    smoothing: float,
    evenly: float,
    dx: Tensor | None,
    rowwise: Tensor | None = None,
    columnwise: Tensor | None = None,
    scales: Tensor | None = None,
    format: int = 6,
) -> None: ...
def cross_entropy_forward(
    logits: Tensor | None, labels: Tensor | None, sums: Tensor | None
) -> None: ...
def current_scales_many(
    tensors: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
    format: int,
    power_of_2: bool,
    epsilon: float,
) -> None: ...
def delayed_scaling_update(
    table: Tensor | None,
    reduced: Tensor | None,
    most_recent: bool,
    fp8_max: float,
    margin: int,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
) -> None: ...
def dequantize(
    codes: Tensor | None, format: int, scales: Tensor | None, x: Tensor | None
) -> None: ...
def describe(tensor: Tensor | None) -> dict: ...
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
    dout: Tensor | None,
    seed: Tensor | None,
    p: float,
    dx: Tensor | None = None,
    dbias: Tensor | None = None,
) -> None: ...
def dropout_add_forward(
    x: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor | None,
    p: float,
    out: Tensor | None,
) -> None: ...
def fp8_attention_backward(
    inputs: Sequence[Tensor | None],
    settings: Sequence[int],
    scale: float,
    results: Sequence[Tensor | None],
    pairs: Tensor | None,
    scales: Sequence[Tensor | None],
    amaxes: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    format: int,
) -> None: ...
def fp8_attention_forward(
    inputs: Sequence[Tensor | None],
    settings: Sequence[int],
    scale: float,
    results: Sequence[Tensor | None],
    pairs: Tensor | None,
    scales: Sequence[Tensor | None],
    amaxes: Sequence[Tensor | None],
) -> None: ...
def fp8_attention_refusal(
    sizes: Sequence[Sequence[int]],
    device: int,
    settings: Sequence[int],
    statistics: bool,
    format: int | None,
) -> str: ...
def gather_amax(
    table: Tensor | None, reduced: Tensor | None, most_recent: bool, out: Tensor | None
) -> None: ...
def gemm(
    d: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    a_scales: Tensor | None,
    b_scales: Tensor | None,
    a_format: int,
    b_format: int,
    a_transposed: bool,
    b_transposed: bool,
    fast_accumulation: bool,
    addend: Tensor | None,
    bias: Tensor | None,
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
def merge_parts(
    out: Tensor | None,
    log_sum_exp: Tensor | None,
    parts: Sequence[Tensor | None],
    part_log_sum_exps: Sequence[Tensor | None],
    begins: Sequence[int],
    token_axis: int,
    fresh: bool,
) -> None: ...
def merge_rows(
    rows: Tensor | None, kinds: Tensor | None, into: Tensor | None, active: Tensor | None
) -> None: ...
def moments(x: Tensor | None, row: Tensor | None, active: Tensor | None) -> None: ...
def norm_backward(
    dy: Tensor | None,
    x: Tensor | None,
    gamma: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    kind: int,
    zero_centered: bool,
    residual_grad: Tensor | None,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
) -> None: ...
def norm_forward(
    x: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    kind: int,
    epsilon: float,
    zero_centered: bool,
    y: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scales: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    format: int,
    scale: Tensor | None,
    amax: Tensor | None,
    current: bool,
    amax_epsilon: float,
    power_of_2: bool,
    moments: Tensor | None = None,
    active: Tensor | None = None,
) -> None: ...
def norm_takes_moments(x: Tensor | None, gamma: Tensor | None, beta: Tensor | None) -> bool: ...
def one_shot(
    x: Tensor | None,
    out: Tensor | None,
    memory: Tensor | None,
    group: Tensor | None,
    scatters: bool,
    combine: int,
) -> None: ...
def one_shot_header(ranks: int) -> int: ...
def one_shot_most_ranks() -> int: ...
def peer_copy(
    out: Tensor | None, memory: Tensor | None, group: Tensor | None, rank: int, slot: int
) -> None: ...
def peer_finish(
    x: Tensor | None, memory: Tensor | None, group: Tensor | None, slot: int
) -> None: ...
def peer_memory_bytes(ranks: int, room: int, ring: bool) -> int: ...
def peer_receive(memory: Tensor | None, group: Tensor | None, rank: int, slot: int) -> None: ...
def peer_release(memory: Tensor | None, group: Tensor | None, rank: int, slot: int) -> None: ...
def peer_send(
    x: Tensor | None, memory: Tensor | None, group: Tensor | None, rank: int, slot: int
) -> None: ...
def peer_slot_offset(group: Tensor | None, rank: int, slot: int) -> int: ...
def peer_slots(ranks: int, ring: bool) -> int: ...
def peer_spread(
    x: Tensor | None, memory: Tensor | None, group: Tensor | None, slot: int
) -> None: ...
def peer_sum(
    own: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    memory: Tensor | None,
    group: Tensor | None,
    slot: int,
) -> None: ...
def quantize(
    x: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scales: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    format: int,
    dbias: Tensor | None = None,
    moments: Tensor | None = None,
    active: Tensor | None = None,
) -> None: ...
def quantize_blocks(
    x: Tensor | None,
    rowwise: Tensor | None,
    row_scales: Tensor | None,
    columnwise: Tensor | None,
    column_scales: Tensor | None,
    format: int,
    power_of_2: bool,
    epsilon: float,
    dbias: Tensor | None = None,
) -> None: ...
def quantize_many(
    tensors: Sequence[Tensor | None],
    rowwise: Sequence[Tensor | None],
    columnwise: Sequence[Tensor | None],
    pairs: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
    amaxes: Sequence[Tensor | None],
    format: int,
) -> None: ...
def relax_captures() -> None: ...
def rope(
    x: Tensor | None,
    freqs: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
    batch_first: bool,
    interleaved: bool,
    backward: bool,
    period: int,
    rotated: int,
    out: Tensor | None,
) -> None: ...
def set_device_switches(
    fp8_products: bool, clusters: bool, dependent_launch: bool, shared_bytes: int
) -> None: ...
def set_gemm_definition(definition: object) -> None: ...
def set_library_path(name: str, path: str) -> None: ...
def set_num_threads(count: int) -> None: ...
def set_workspace_functions(zeros: object, empty: object, counts_tiles: object) -> None: ...
def softmax_backward(
    dy: Tensor | None, y: Tensor | None, scale: float, dx: Tensor | None
) -> None: ...
def softmax_forward(
    x: Tensor | None,
    mask: Tensor | None,
    scale: float,
    left: int,
    right: int,
    diagonal: int,
    y: Tensor | None,
) -> None: ...
def statistics(row: Sequence[float]) -> dict[str, float]: ...
def sum_squares(tensors: Sequence[Tensor | None], sums: Tensor | None) -> None: ...
def transpose(
    x: Tensor | None,
    out: Tensor | None,
    scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> None: ...
def zero(out: Tensor | None) -> None: ...
