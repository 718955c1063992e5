"""`precision hardware profile`: measures this machine, in a process that may load torch."""

import subprocess
import sys
from typing import Annotated

import typer

from api import operate
from api.operate import DataDir
from api.options import AsJson


def profile(
    model: Annotated[
        str, typer.Argument(help="Whose shapes are timed: a name, or a folder.")
    ],
    device: Annotated[
        str, typer.Option(help="Its id in the catalog. Default: by its name.")
    ] = "",
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 128,
    as_json: AsJson = False,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Time this machine's kernels over a model's shapes; jobs for its GPU use the figures."""
    command = [sys.executable, "-m", "workers.profiles", model]
    command += ["--data-dir", str(data_dir), "--device", device]
    command += ["--batch-size", str(batch_size)]
    command += ["--prompt-tokens", str(prompt_tokens)]
    command += ["--output-tokens", str(output_tokens), *(["--json"] if as_json else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
