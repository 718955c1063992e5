"""What benchmarks of the numerics run on: the demo model and built-in text."""

import argparse
import os
from pathlib import Path

import torch

from optimizer import model, tokens
from optimizer.model import LoadedModel
from optimizer.tokens import Tokens
from workers import demo


def options(description: str, sequence: int = 256) -> argparse.ArgumentParser:
    """Return a parser of the options that `inputs` reads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokens", type=int, default=2048, help="to calibrate on")
    parser.add_argument("--held-out", type=int, default=2048, help="tokens")
    parser.add_argument("--sequence", type=int, default=sequence, help="tokens")
    parser.add_argument("--distribution", default="web_text")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    return parser


def inputs(arguments: argparse.Namespace) -> tuple[LoadedModel, Tokens]:
    """Load the demo model and the tokens of both halves."""
    torch.set_num_threads(arguments.threads)
    folder = demo.demo_model(arguments.data_dir)
    read = tokens.read(
        folder,
        arguments.distribution,
        None,
        calibration_tokens=arguments.tokens,
        validation_tokens=arguments.held_out,
        sequence_tokens=arguments.sequence,
    )
    return model.load(folder), read
