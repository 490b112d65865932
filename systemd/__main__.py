"""`python -m kvslot.systemd`: see install.py."""

import sys

from kvslot.systemd.install import main

if __name__ == "__main__":
    sys.exit(main())
