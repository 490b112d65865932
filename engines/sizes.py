"""What commands of adapters take for the size of a pool; the daemon, which reads it, has the last word."""

from __future__ import annotations

import argparse
import re


def size(text: str) -> str:
    """`text` as it is, if it is a size: "4GiB", "512MiB", "8GB", a number of bytes.  For argparse."""
    if not re.fullmatch(r"\d+(\.\d+)?\s*([KMGT](i?B)?|B)?", text.strip(), re.IGNORECASE):
        raise argparse.ArgumentTypeError(f'{text!r} is no size: write "512MiB", "4GiB" or a number of bytes')
    return text.strip()
