"""The peers, each run in their own virtual environment; what they answered is kept."""

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).parent
PYTHON = Path(".venv-peers/bin/python")
MISSING = "the peers are not installed here: run `make peers` first"


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of somebody else's to choose the narrow layers."""

    name: str
    script: str
    method: str = ""
    slow: bool = False


PEERS = (
    Peer("modelopt gradient", "modelopt_auto.py", "gradient"),
    Peer("modelopt kl_div", "modelopt_auto.py", "kl_div", slow=True),
    Peer("AutoScheme", "autoscheme.py"),
    Peer("AIMET", "aimet_amp.py", slow=True),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer decided: the names of the 8-bit matrices, by effective bits."""

    narrow: dict[float, frozenset[str]]
    seconds: float  # of the clock, from the loaded model to the first stack
    cpu_seconds: float
    version: str

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Answer":
        narrow = {float(b): frozenset(names) for b, names in data["narrow"].items()}
        return cls(narrow, data["seconds"], data["cpu_seconds"], data["version"])


def ask(
    peer: Peer,
    folder: Path,
    sequences: Sequence[torch.Tensor],
    bits: Sequence[float],
    kept: Path,
) -> Answer:
    """Return the peer's answer, from `kept` where the same question was answered.

    Raises RuntimeError with the end of its log where the peer fails.
    """
    request = {
        "folder": str(folder.resolve()),
        "sequences": [ids[0].tolist() for ids in sequences],
        "bits": list(bits),
        "method": peer.method,
    }
    asked = json.dumps([peer.script, {**request, "folder": folder.name}])
    key = hashlib.sha256(asked.encode()).hexdigest()[:16]
    answer = kept / f"{peer.name.replace(' ', '_')}-{key}.json"
    if not answer.exists():
        _run(peer, request, answer)
    return Answer.of(json.loads(answer.read_text()))


def _run(peer: Peer, request: dict[str, Any], answer: Path) -> None:
    if not PYTHON.exists():
        raise RuntimeError(MISSING)
    answer.parent.mkdir(parents=True, exist_ok=True)
    question = answer.with_suffix(".request")
    question.write_text(json.dumps(request))
    made, log = answer.with_suffix(".part"), answer.with_suffix(".log")
    command = [PYTHON, SCRIPTS / peer.script, question, made]
    with log.open("w") as output:
        done = subprocess.run(
            [str(c) for c in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{peer.name} failed:\n{log.read_text()[-2000:]}")
    made.rename(answer)  # whole or not at all
