"""The benchmark tools, as far as they run without a GPU: rows, files, the report."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_training
import fidelity
import fidelity_gemms
import fidelity_page
import goals
import harness
import merge_training
import pages
import profiling
import report
import training_chart
import training_costs
import training_models
from benchmark_ranks import dry_run
from ranks import run_ranks

import transformer_engine.pytorch as te


def test_report_prints_and_saves_rows(tmp_path, capsys):
    rows = harness.Report("cast", tmp_path)
    rows.row(op="cast", case="8x8", ratio=0.97, bar=0.95)
    assert "op=cast  case=8x8  ratio=0.97  bar=0.95" in capsys.readouterr().out
    document = json.loads(rows.save().read_text())
    assert document["rows"] == [{"op": "cast", "case": "8x8", "ratio": 0.97, "bar": 0.95}]
    assert document["torch"] == torch.__version__
    assert {"gpu", "cuda", "commit", "date"} <= document.keys()


def test_results_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TE_BENCH_RESULTS", str(tmp_path / "new"))
    assert harness.Report("cast").save() == tmp_path / "new" / "cast.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_message_is_clear():
    with pytest.raises(SystemExit, match="no CUDA device here"):
        harness.time_gpu(lambda: None)


def test_timings():
    timing = harness.Timing.of([float(i) for i in range(101)])
    assert (timing.min_us, timing.p10_us, timing.median_us, timing.p90_us) == (0, 10, 50, 90)
    called = []
    contenders = {name: lambda name=name: called.append(name) for name in "ab"}
    how = {"loops": 2, "calls": 3, "warmup": 1, "meet": lambda: called.append("|")}
    both = harness.time_host_each(contenders, **how)
    assert "".join(called) == "ab" + "|aaa|bbb" * 2, "in turns"
    assert both.keys() == contenders.keys() and both["a"].median_us > 0


@pytest.mark.gpu
def test_a_copy_runs_at_the_speed_of_memory():
    assert 1 < (1 << 30) / harness.copy_us(1 << 30) * 1e-6 < 20, "TB/s"
    x = torch.ones(1 << 20, device="cuda")
    assert harness.time_graph(lambda: x.mul_(1), repeats=5).median_us > 0


ROWS = [
    {"op": "cast", "case": "large", "us": 12.345678, "copy_us": 12.0, "ratio": 0.972, "bar": 0.95},
    {"op": "cast", "case": "small", "ratio": 0.5, "bar": 0.95},
    {"op": "cast", "case": "free", "ratio": 0.1},
    {"op": "cast + transpose", "case": "a|b", "ratio": 0.9, "bar": 1.0, "better": "lower"},
]


def documents():
    where = {"gpu": "H", "torch": "2", "cuda": "13", "commit": "c0ffee", "date": "2000-01-01T00:00"}
    return {"quantize": {**where, "rows": ROWS}}


def test_summary_judges_rows_with_a_bar():
    text = report.render(documents(), has_chart=False)
    assert "| cast | >= 0.95 of copy | 0.50 - 0.97, 1 of 2 met | TE 0.91 |" in text
    assert "| cast + transpose | >= 0.88 of copy | 0.90, met |" in text
    assert "| RMSNorm backward | >= 0.87 of copy | not measured | TE 0.87 |" in text


def test_details_show_every_row():
    text = report.render(documents(), has_chart=False)
    assert "H, torch 2, CUDA 13, commit c0ffee, 2000-01-01." in text
    assert "| cast | large | 12.35 | 0.972 | >= 0.95 met |" in text
    assert "| cast | small |  | 0.5 | >= 0.95 **missed** |" in text
    assert "| cast | free |  | 0.1 |  |" in text
    assert r"| cast + transpose | a\|b |  | 0.9 | <= 1.00 met |" in text


def test_chart_is_the_same_file_for_the_same_results(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    assert report.draw(documents(), first)
    assert report.draw(documents(), second)
    assert first.read_bytes() == second.read_bytes()
    assert not report.draw({}, first)


def test_goals_are_distinct():
    assert len({goal.work for goal in goals.GOALS}) == len(goals.GOALS)


def test_every_goal_is_measured():
    documents = report.load(Path(report.__file__).parent / "results")
    missing = [goal.work for goal in goals.GOALS if not report.rows_of(goal, documents)]
    assert not missing


@pytest.mark.parametrize("kind", [fidelity.KINDS[0], fidelity.KINDS[-1]], ids=str)
def test_trainings_of_many_seeds_are_those_of_the_example(kind, tmp_path):
    settings = fidelity.settings_of(kind, 3, "tiny", 2, "cpu")
    line = fidelity.trained(settings, fidelity.load_text(None))
    assert (line["precision"], line["seed"], line["steps"]) == (settings.label, 3, 2)
    assert 3 < line["validation"] < 6 and len(line["curve"]) == 2
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert fidelity.lines(path) == [line] and fidelity.lines(tmp_path / "none") == []


def test_differences_are_those_of_pairs():
    losses = {"bf16": [1.0, 2.0, 4.0], "fp8 delayed": [1.01, 2.04, 4.12], "fp8 current": [1.5]}
    done = [
        {"precision": name, "seed": seed, "validation": loss}
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    bf16, delayed = fidelity.differences(done)
    assert bf16 == {"precision": "bf16", "seeds": 3, "loss": 2.3333, "percent": 0.0, "interval": 0}
    assert (delayed["percent"], delayed["interval"]) == (2.0, round(4.30 / 3**0.5, 3))


def test_the_page_shows_differences_and_their_course(tmp_path):
    names = ["fp8 current", "bf16", "fp8 delayed"]
    done = [
        {"precision": name, "seed": seed, "steps": 4, "validation": loss, "curve": [loss, loss]}
        for number, name in enumerate(names)
        for seed, loss in enumerate([1.0 + 0.1 * number, 2.0])
    ]
    rows = fidelity_page.differences_table(done).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| bf16", "| fp8 delayed", "| fp8 current"]
    assert rows[1].endswith("| 1.6000 | +4.5 ± 57.8 % |")
    target = tmp_path / "figure.svg"
    fidelity_page.draw(done, target)
    assert target.read_text().count("fp8 delayed") and "training loss" in target.read_text()


def test_gradients_are_compared_with_one_kind_of_gemm_in_fp8():
    settings = fidelity.settings_of(fidelity.FP8[1], 0, "tiny", 1, "cpu")
    training = fidelity.Training(replace(settings, layers=1), fidelity.load_text(None))
    batches = [training.batches.training(0)]
    te.gemm_report(reset=True)
    with fidelity_gemms.in_fp8_alone("dgrad"):
        found = fidelity_gemms.gradients(training, batches)
    counts = te.gemm_report(reset=True).counts
    assert {gemm for _, gemm, precision in counts if precision.startswith("fp8")} == {"dgrad"}
    assert found.shape == (1, training.parameters)
    with torch.no_grad():
        assert fidelity_gemms.apart(2.0 * found, found) == {"error": 1.0, "systematic": 1.0}
    opposite = torch.cat([found, -found])
    assert fidelity_gemms.apart(torch.zeros_like(opposite), opposite)["systematic"] == 0.0


def test_the_page_shows_errors_of_gemms():
    cases = [name for name, *_ in fidelity_gemms.cases()]
    assert len(cases) == 1 + 3 * 4
    rows = [
        {"case": case, "error": 0.01 * step * i, "systematic": 0.001 * i}
        for step in (1, 3)
        for i, case in enumerate(cases)
    ]
    table = fidelity_page.gemms_table(rows).splitlines()
    assert table[2] == "| none, all in bf16 " + 3 * "| 0.0 % / 0.0 % " + "|"
    assert table[4] == "| fprop | 4.0 % / 0.2 % | 12.0 % / 0.6 % | 20.0 % / 1.0 % |"


def test_readme_shows_trainings_that_have_all_rows(tmp_path):
    def document(model, speed, cases):
        rows = [
            {"op": f"training {model} s64", "case": case, "tokens_per_s": speed * (i + 1)}
            for i, case in enumerate(cases)
        ]
        return {"rows": [{**row, "ratio": row["tokens_per_s"] / speed, "gib": 7.6} for row in rows]}

    cases = list(training_chart.SHOWN)
    documents = {
        "training_large": document("Large", 1e3, cases),
        "training_small": document("Small", 9e3, cases),
        "training_part": document("Part", 1e3, cases[:-1]),
        "norm": {"rows": [{"op": "norm", "case": "8x8", "ratio": 1.0}]},
    }
    header, *lines = training_chart.training_table(documents)
    assert header[1:] == [name for name, _ in training_chart.SHOWN.values()]
    assert header[2:4] == ["torch.compile", "torchao, FP8"]
    assert [line[0] for line in lines] == ["Small", "Large"]
    assert lines[1][5] == "5 (5.00x, 7.6 GiB)"
    target, page = tmp_path / "chart.svg", tmp_path / "page.md"
    training_chart.draw_trainings(documents, target)
    assert "Large" in target.read_text() and "Part" not in target.read_text()
    for row in documents["training_large"]["rows"]:
        row.update(op="largest batch of Large s64", batch=12)
    _, *lines = training_chart.largest_table(documents)
    assert [line[:2] for line in lines] == [["Large", "1 (1.00x, 12 sequences)"]]
    page.write_text("before\n<!-- name -->\nold\n<!-- end of name -->\nafter\n")
    pages.put_into(page, "name", "new")
    assert page.read_text() == ("before\n<!-- name -->\n\nnew\n\n<!-- end of name -->\nafter\n")


def test_rows_that_a_new_run_lacks_stay_with_their_commit():
    def document(commit, **speeds):
        names = {"plain": "torch, compiled", "ours": "ours bf16", "graphs": "ours bf16, in graphs"}
        rows = [
            {"op": "training", "case": names[name], "tokens_per_s": speed, "gib": 1.0}
            for name, speed in speeds.items()
        ]
        return {"commit": commit, "rows": [*rows, {"op": "bf16 over torch.compile", "ratio": 9.0}]}

    old, new = document("a", plain=100, ours=130, graphs=180), document("b", plain=200, ours=220)
    *rows, speed, memory = merge_training.merged("training_125m", old, new)["rows"]
    of_rows = [(row["case"], row["ratio"], row.get("commit")) for row in rows]
    assert of_rows == [
        ("torch, compiled", 1.0, None),
        ("ours bf16", 1.1, None),
        ("ours bf16, in graphs", 0.9, "a"),
    ]
    assert (speed["ratio"], memory["ratio"]) == (1.1, 1.0)


ROWS_OF_TRAINING = ["torch", "ours bf16", "ours fp8 (delayed|weights), in graphs"]


@pytest.mark.parametrize("model", list(training_models.TINY))
def test_trainings_run_everywhere(model, tmp_path, monkeypatch):
    """Trains tiny models with the code for GPUs, except captures and timings."""
    monkeypatch.setenv("TE_BENCH_RESULTS", str(tmp_path))
    small = ["--tiny", "--tokens", "64", "--models", model]
    assert bench_training.main([*small, "--rows", *ROWS_OF_TRAINING]) == 0
    rows = json.loads((tmp_path / f"training_{model}_tiny.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "ours fp8 delayed, in graphs",
        "ours fp8 weights, in graphs",
        "ours bf16",
        "torch",
    ]
    assert all(4.5 < row["loss"] < 5.7 and row["tokens_per_s"] > 0 for row in rows), rows


@pytest.mark.parametrize("row", ["torch, compiled", "ours fp8 current, compiled"])
def test_trainings_are_compiled(row, tmp_path, monkeypatch):
    monkeypatch.setenv("TE_BENCH_RESULTS", str(tmp_path))
    one_layer = replace(training_models.TINY["1.3b"], layers=1)  # a layer takes seconds to compile
    monkeypatch.setitem(training_models.TINY, "1.3b", one_layer)
    assert bench_training.main(["--tiny", "--tokens", "64", "--models", "1.3b", "--rows", row]) == 0
    (found, *_) = json.loads((tmp_path / "training_1.3b_tiny.json").read_text())["rows"]
    assert found["case"] == row and found.get("ratio", 1.0) == 1.0


def test_a_training_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("TE_BENCH_RESULTS", str(tmp_path))
    arguments = ["--tiny", "--tokens", "256", "--models", "125m", "--losses", "60"]
    bench_training.main([*arguments, "--rows", "ours bf16"])
    (row,) = json.loads((tmp_path / "training_125m_tiny.json").read_text())["rows"]
    assert row["steps"] == 60 and row["loss"] < 5.3


@pytest.mark.timeout(300)  # ranks wait for each other on busy machines
@pytest.mark.parametrize(("model", "precision"), [("125m", "fp8 delayed"), ("1.3b", "bf16")])
def test_two_ranks_train_as_one_process(model, precision):
    (rows, alone), (others, _) = run_ranks(2, dry_run, model, precision)
    assert others == [], "only the first rank reports"
    assert [row["way"] for row in rows] == ["one GPU", "DDP", "FSDP2", "TP2 + SP"]
    assert [row.get("bar") for row in rows] == [None, 1.9, 1.9, 1.9]
    for row in rows[1:]:
        assert row["loss"] == pytest.approx(alone, abs=2e-3), row
        assert any(goal.covers(f"training_ranks_{model}", row["op"]) for goal in goals.GOALS)


KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT": "FP8 products",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "products",
    "void te::cuda::(anonymous namespace)::adam_kernel<te::BFloat16, te::BFloat16>": "AdamW",
    "void te::cuda::tile_map_kernel<te::BFloat16, Identity<false>, true, false>": "casts",
    "te::cuda::tile_map_kernel<te::BFloat16, Backward<te::SigmoidUnit>, true>": "activations",
    "te::cuda::backward_kernel<te::BFloat16, te::BFloat16, (te::NormKind)1, 2>": "norms",
    "te::cuda::cross_entropy_backward_kernel<te::BFloat16>(int*)": "cross entropy",
    "triton_red_fused__fused_rms_norm__unsafe_view_add_7": "fused by torch.compile",
    "unheard_of": "other",
}


def test_costs_of_trainings():
    assert {kernel: training_costs.kind_of(kernel) for kernel in KERNELS} == KERNELS
    names = list(KERNELS)
    profile = profiling.Profile(0.9, {names[1]: 60.0, names[2]: 10.0, names[0]: 25.0, "x": 5.0})
    found = training_costs.largest_costs(profile)
    assert found == "FP8 products 60%, attention 25%, products 10%"


def test_rows_of_trainings():
    names = [str(row) for row in bench_training.ROWS]
    assert len(set(names)) == len(names)
    assert [str(row) for row in bench_training.chosen(["ours bf16"])] == ["ours bf16"]
    assert "torch, compiled" in map(str, bench_training.DEFAULT)
    sizes = training_models.ARCHITECTURES
    gpt = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50304 * 768
    assert sizes["125m"].flops_of_a_token == 6 * gpt + 6 * 12 * 768 * 1024
    llama = 24 * (2048 * (2048 + 2 * 512 + 2048) + 3 * 2048 * 5504) + 50304 * 2048
    assert sizes["1.3b"].flops_of_a_token == 6 * llama + 6 * 24 * 2048 * 4096


@pytest.mark.parametrize("kind", ["", "_largest"])
def test_trainings_are_judged(tmp_path, kind):
    def figures(speed, gib, batch):
        return {"tokens_per_s": speed, "gib": gib, "batch": batch}

    rows = {str(row): row for row in bench_training.ROWS}
    found = {
        rows["torch, compiled"]: figures(100, 4.0, 20),
        rows["torch"]: figures(80, 5.0, 16),
        rows["ours bf16"]: figures(110, 3.0, 30),
        rows["ours fp8 delayed"]: figures(140, 6.0, 10),
        rows["ours fp8 current, in graphs"]: figures(150, 6.5, 10),
    }
    sizes = training_models.ARCHITECTURES["125m"]
    table = harness.Report(f"training_125m{kind}", tmp_path)
    bench_training.judge(table, "125m", sizes, found, largest=bool(kind))
    memory, bf16, fp8 = {
        "": ("peak memory over the least of others", 0.75, 1.5),
        "_largest": ("batch over the largest of others", 1.5, 0.5),
    }[kind]
    assert [(row["op"], row["ratio"]) for row in table.rows] == [
        ("bf16 over torch.compile", 1.1),
        (f"bf16 {memory}", bf16),
        ("fp8 over torch.compile", 1.5),
        (f"fp8 {memory}", fp8),
    ]
    results = {f"training_125m{kind}": {"rows": table.rows}}
    covered = [goal for goal in goals.GOALS if report.rows_of(goal, results)]
    assert len(covered) == 3


@pytest.mark.parametrize(
    ("gib", "found", "tries"),
    [
        (lambda n: 20 + 4.5 * n, 12, 5),
        (lambda n: max(20 + 2 * n, 6 * n), 12, 10),
        (lambda n: 50 + 12 * n, 2, 3),
    ],
    ids=["fails once", "other memory is the peak of small batches", "the second fails"],
)
def test_largest_batch_is_found(monkeypatch, gib, found, tries):
    batches = []

    def train(row, sizes, batch, options):
        batches.append(batch)
        if gib(batch) > 77:  # the rest is lost to fragmentation
            raise torch.OutOfMemoryError
        return {"batch": batch, "gib": gib(batch)}

    monkeypatch.setattr(bench_training, "train", train)
    monkeypatch.setattr(bench_training, "free", lambda: None)
    sizes = training_models.ARCHITECTURES["1.3b"]
    figures = bench_training.train_largest("a row", sizes, None)
    assert figures == {"batch": found, "gib": gib(found)}
    assert len(batches) == len(set(batches)) == tries
