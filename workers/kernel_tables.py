"""Makes `optimizer/data/kernels/` from the timings that `aiconfigurator-core` carries.

    python -m workers.kernel_tables --package installed --out optimizer/data/kernels

The package (Apache-2.0; `pip install "precision[kernels]"`, no GPU) holds one parquet
file for each system, kind of kernel, engine and version. This keeps, for every device
of our catalogue that it knows, the newest version of an engine that has GEMMs, and of
that what a dense decoder needs (`kernel_source` says how it is read). The same package
gives the same bytes.
"""

import argparse
import importlib.util
import io
import json
import math
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from optimizer.attention_times import Section
from optimizer.four_digits import encode
from optimizer.grid import grid
from optimizer.hardware import DEVICES
from workers.kernel_source import Array, Columns, Source, arrays

SYSTEMS = {  # the package's name of a system: our id of its device
    "a100_sxm": "a100",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
ENGINES = ("vllm", "trtllm")


def read_parquet(path: Path) -> Columns:
    """Return the columns of a parquet file."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}


def _errors(array: Array) -> Sequence[float]:
    """Return the leave-one-out errors that a reader would find, of each axis."""
    if "pairs" in array.facts:
        pairs = [(h, kv) for h, kv in array.facts["pairs"]]
        return Section.of(pairs, array.axes, array.seconds).all_errors
    return grid(array.axes, array.seconds).errors


def _dropped(found: Sequence[Array]) -> dict[str, int]:
    """Return the rows left out of each kind of kernel that has any."""
    counts: Counter[str] = Counter()
    for array in found:
        counts[f"{array.facts['op']} {array.facts.get('fmt', '')}".strip()] += (
            array.dropped
        )
    return {kind: n for kind, n in counts.items() if n}


def pack(source: Source, origin: str) -> bytes | None:
    """Return the file of a system and engine; None where the package has no GEMMs."""
    found = list(arrays(source))
    if "gemm" not in source.versions:
        return None
    entries = [
        {
            "name": f"a{i}.npy",
            **a.facts,
            "axes": a.axes,
            "errors": [
                None if math.isnan(e) else float(f"{e:.3g}") for e in _errors(a)
            ],
        }
        for i, a in enumerate(found)
    ]
    header = {
        "schema": 1,
        "device": source.device.id,
        "engine": source.engine,
        "engine_version": source.versions["gemm"],
        "origin": origin,
        "facts": {
            "system": source.system,
            "versions": source.versions,
            "license": "Apache-2.0; see NOTICE beside this file",
            "changes": "selected, put on grids, rounded to four digits",
            "faster_than_the_device": _dropped(found),  # rows that were left out
        },
        "arrays": entries,
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        _add(archive, "header.json", json.dumps(header, separators=(",", ":")).encode())
        for entry, array in zip(entries, found, strict=True):
            codes = io.BytesIO()
            np.save(codes, encode(array.seconds))
            _add(archive, entry["name"], codes.getvalue())
    return out.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add a member whose bytes depend on nothing but its content."""
    member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    archive.writestr(member, content, zipfile.ZIP_DEFLATED, 9)


def main(arguments: list[str], read: Callable[[Path], Columns] = read_parquet) -> None:
    """Write a file for each device and engine."""
    parser = argparse.ArgumentParser(prog="python -m workers.kernel_tables")
    parser.add_argument("--package", required=True, help='its folder, or "installed"')
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(arguments)
    root, origin = _package(options.package)
    options.out.mkdir(parents=True, exist_ok=True)
    for (system, device), engine in product(SYSTEMS.items(), ENGINES):
        if device in DEVICES:
            source = Source(root, system, engine, DEVICES[device], read)
            content = pack(source, origin)
            if content is not None:
                (options.out / f"{device}.{engine}.npz").write_bytes(content)


def _package(name: str) -> tuple[Path, str]:
    """Return the package's folder, and what to call it."""
    root = Path(name)
    if name == "installed":
        spec = importlib.util.find_spec("aiconfigurator_core")
        if spec is None or spec.origin is None:
            sys.exit('install it first: pip install "precision[kernels]"')
        root = Path(spec.origin).parent
    found = [p.name for p in root.parent.glob("aiconfigurator_core-*.dist-info")]
    version = found[0].split("-")[1].removesuffix(".dist") if found else "unversioned"
    return root, f"aiconfigurator-core {version}"


if __name__ == "__main__":
    main(sys.argv[1:])
