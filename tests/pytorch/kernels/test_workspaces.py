"""Workspaces, which each kernel leaves zero for the next one, if a CUDA graph is the first user."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.activation import activation_forward, activation_kind
from transformer_engine.pytorch.kernels.moments import empty_moments


@pytest.mark.gpu
def test_graphs_share_a_workspace_that_a_capture_made():
    x, kind = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16), activation_kind("gelu")
    row = empty_moments("cuda")

    def work():
        return activation_forward(x, kind, True, current=True, moments=row)

    y, *_, scales = work()
    expected = row.clone()
    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def captured(call):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, pool=pool):
            results = call()
        return graph, results

    used, _ = captured(lambda: torch.ones(65536, device="cuda").sum())
    used.replay()  # memory that is free now holds ones
    torch.cuda.empty_cache()  # workspaces need memory that torch must ask CUDA for
    _, (graph, results) = captured(work), captured(work)
    row.copy_(empty_moments())
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise(results[0], y)
    assert_bitwise(results[3], scales)
    assert_bitwise(row, expected)
    assert_bitwise(work()[3], scales)
