"""The long form: python -m tests.restart [kills] [seed]."""

import sys
import time

from .killing import kill_under_load

kills, seed = (int(each) for each in [*sys.argv[1:], "100", "1"][:2])
began = time.monotonic()
print(kill_under_load(kills, seed), f"{time.monotonic() - began:.1f} s")
