"""`python -Im kvslot.benchmarks.gaps`."""

import sys

from kvslot.benchmarks.gaps import main

sys.exit(main())
