"""`python -m kvslot.daemon` is `kvslotd`."""

import sys

from kvslot.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
