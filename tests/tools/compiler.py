"""Tests of what is written in C are for machines that have a compiler of it."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"
)
