"""The script that makes the kernel tables, on a package of a few rows."""

import json
import math
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from optimizer import kernels
from workers import kernel_tables


def read(path):
    """Read a table that the tests wrote as JSON under a parquet name."""
    return {name: np.array(v) for name, v in json.loads(path.read_text()).items()}


def write(root, place, name, version, **columns):
    folder = root / "systems/data" / place / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_perf.parquet").write_text(json.dumps(columns))


def gemms(root, version="0.24.0", engine="vllm", latency=(0.010, 0.020, 0.040), **more):
    write(
        root,
        f"h100_sxm/gemm/{engine}",
        "gemm",
        version,
        gemm_dtype=["bfloat16"] * 3,
        m=[1, 1, 1],
        n=[1024, 2048, 4096],
        k=[1024] * 3,
        latency=list(latency),
        **more,
    )


def make(root, out):
    kernel_tables.main(["--package", str(root), "--out", str(out)], read)
    return {path.name: path for path in out.iterdir()}


def tables_of(path):
    with path.open("rb") as file, np.load(file) as archive:
        return kernels._unpack(archive)


@pytest.fixture
def root(tmp_path):
    package = tmp_path / "aiconfigurator_core"
    package.mkdir()
    (tmp_path / "aiconfigurator_core-0.12.0.dist-info").mkdir()
    return package


def test_a_gemm_is_seconds_on_a_grid(root, tmp_path):
    gemms(root)
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.gemm("bf16", 1, 2048, 1024).seconds == 2e-5
    assert (known.device, known.version) == ("h100", "0.24.0")
    assert known.origin == "aiconfigurator-core 0.12.0"


def test_the_newest_version_is_taken_by_number_not_by_letter(root, tmp_path):
    gemms(root, "0.9.0", latency=(1, 1, 1))
    gemms(root, "0.14.0")
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.version == "0.14.0"


def test_what_a_device_does_not_have_gives_no_file(root, tmp_path):
    gemms(root, engine="trtllm")
    assert list(make(root, tmp_path / "out")) == ["h100.trtllm.npz"]


def test_the_same_package_gives_the_same_bytes(root, tmp_path):
    gemms(root)
    first = make(root, tmp_path / "first")["h100.vllm.npz"].read_bytes()
    assert make(root, tmp_path / "second")["h100.vllm.npz"].read_bytes() == first


def test_a_time_that_the_memory_cannot_reach_is_dropped_and_counted(root, tmp_path):
    # 4096 × 1024 weights in bf16 are 8.4 MB: 2.5 µs at 3.35 TB/s.
    gemms(root, latency=(0.010, 0.020, 0.0024))
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.gemm("bf16", 1, 4096, 1024) is None
    assert known.facts["faster_than_the_device"] == {"gemm bf16": 1}


def test_block_gemms_timed_without_graphs_are_left_out_of_one_engine(root, tmp_path):
    for engine in ("vllm", "trtllm"):
        write(
            root,
            f"h100_sxm/gemm/{engine}",
            "gemm",
            "1.0",
            gemm_dtype=["bfloat16", "fp8_block"],
            m=[1, 1],
            n=[1024, 1024],
            k=[1024, 1024],
            latency=[0.010, 0.012],
        )
    made = make(root, tmp_path / "out")
    assert set(tables_of(made["h100.vllm.npz"]).gemms) == {"bf16"}
    assert set(tables_of(made["h100.trtllm.npz"]).gemms) == {"bf16", "fp8_block"}


def attention(root, op, **columns):
    rows = len(columns["latency"])
    write(
        root,
        "h100_sxm/attention/vllm",
        f"{op}_attention",
        "0.24.0",
        **{
            "attn_dtype": ["bfloat16"] * rows,
            "kv_cache_dtype": ["fp8"] * rows,
            "batch_size": [1] * rows,
            "num_heads": [8] * rows,
            "num_key_value_heads": [2] * rows,
            "head_dim": [128] * rows,
            **columns,
        },
    )


def test_a_decode_step_counts_the_new_token_in_its_context(root, tmp_path):
    gemms(root)
    attention(root, "generation", isl=[1, 1], step=[511, 1023], latency=[0.01, 0.02])
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.generation_attention("fp8", 1, 512, 8, 2, 128).seconds == 1e-5
    assert known.generation_attention("bf16", 1, 512, 8, 2, 128) is None


def test_rows_that_say_the_same_twice_are_averaged(root, tmp_path):
    gemms(root)
    attention(root, "context", isl=[512, 512], step=[0, 0], latency=[0.01, 0.02])
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.context_attention("fp8", 1, 512, 8, 2, 128).seconds == 1.5e-5


def test_windows_are_kept_apart(root, tmp_path):
    gemms(root)
    attention(
        root,
        "context",
        isl=[512, 512],
        step=[0, 0],
        window_size=[0, 128],
        latency=[0.02, 0.01],
    )
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    shape = ("fp8", 1, 512, 8, 2, 128)
    assert known.context_attention(*shape).seconds == 2e-5
    assert known.context_attention(*shape, window=128).seconds == 1e-5
    # A window that sees everything is none; one that nobody timed has no time.
    assert known.context_attention(*shape, window=512).seconds == 2e-5
    assert known.context_attention(*shape, window=64) is None


@pytest.mark.parametrize(("window", "dropped"), [(0, 1), (128, 0)])
def test_attention_faster_than_its_products_or_its_cache_is_dropped(
    root, tmp_path, window, dropped
):
    # 64 sequences × 8192 tokens × 8 KV heads × 128 × K and V = 1.07 GB in FP8: 321 µs.
    # A window of 128 tokens reads 64 times less.
    gemms(root)
    attention(
        root,
        "generation",
        isl=[1],
        step=[8191],
        batch_size=[64],
        num_key_value_heads=[8],
        window_size=[window],
        latency=[0.1],
    )
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    found = known.facts["faster_than_the_device"]
    assert found.get("generation fp8", 0) == dropped


def test_finding_the_scale_is_added_to_the_cast(root, tmp_path):
    gemms(root)
    place = "h100_sxm/quantize/vllm"
    shapes = {"m": [1, 64, 128], "k": [4096] * 3}
    static = {**shapes, "latency": [0.002, 0.003, 0.004]}
    extra = {"m": [1, 64, 512], "k": [4096] * 3, "latency": [0.001, -0.0005, 1]}
    write(root, place, "scale_matrix", "0.24.0", **static)
    write(root, place, "computescale", "0.24.0", **extra)
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.quantize(1, 4096).seconds == 2e-6
    assert known.quantize(1, 4096, dynamic=True).seconds == 3e-6
    assert known.quantize(64, 4096, dynamic=True).seconds == 2.5e-6
    assert known.quantize(128, 4096, dynamic=True) is None  # no row of the second


def test_the_all_reduce_is_that_of_graphs_in_bytes_of_its_own_version(root, tmp_path):
    gemms(root)
    write(
        root,
        "h100_sxm/comm/vllm",
        "custom_allreduce",
        "0.22.0",
        kernel_source=["vLLM_custom_eager", "vLLM_custom_graph"],
        num_gpus=[2, 2],
        message_size=[4096, 4096],
        latency=[0.020, 0.004],
    )
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.all_reduce(2, 8192).seconds == 4e-6
    assert known.all_reduce(4, 8192) is None
    assert known.facts["versions"]["custom_allreduce"] == "0.22.0"


def test_a_file_says_what_is_in_it_to_anyone_who_unzips_it(root, tmp_path):
    gemms(root)
    with zipfile.ZipFile(make(root, tmp_path / "out")["h100.vllm.npz"]) as archive:
        header = json.loads(archive.read("header.json"))
    assert header["facts"]["license"].startswith("Apache-2.0")
    (entry,) = header["arrays"]
    assert entry["axes"] == [[1], [1024, 2048, 4096], [1024]]
    # The middle lies on neither: 10 + (40 - 10) / 3 is 20, the measured 20: no error.
    assert entry["errors"] == [None, pytest.approx(0, abs=1e-9), None]


def test_the_installed_package_is_found_by_its_name(root, tmp_path, monkeypatch):
    (root / "__init__.py").write_text("")
    gemms(root)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    kernel_tables.main(["--package", "installed", "--out", str(out)], read)
    assert tables_of(out / "h100.vllm.npz").origin == "aiconfigurator-core 0.12.0"


def test_without_the_package_the_script_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="precision\\[kernels\\]"):
        kernel_tables.main(["--package", "installed", "--out", str(tmp_path)], read)


def test_a_folder_without_its_metadata_has_no_version(root, tmp_path):
    (tmp_path / "aiconfigurator_core-0.12.0.dist-info").rmdir()
    gemms(root)
    known = tables_of(make(root, tmp_path / "out")["h100.vllm.npz"])
    assert known.origin == "aiconfigurator-core unversioned"


def test_parquet_is_read_column_by_column(monkeypatch, tmp_path):
    column = SimpleNamespace(to_pylist=lambda: [1.0, 2.0])
    table = type("Table", (dict,), {"column_names": ["latency"]})(latency=column)
    parquet = SimpleNamespace(read_table=lambda path: table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    read_back = kernel_tables.read_parquet(tmp_path / "x")
    assert read_back["latency"].tolist() == [1.0, 2.0]
    assert not math.isnan(read_back["latency"][0])
