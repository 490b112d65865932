"""What all tests share: Hypothesis without deadlines, since a machine under load is no fault of ours.

Under CI Hypothesis itself takes fixed examples instead of fresh ones; what this profile does not name it leaves alone.
And ^C means something: who runs the tests in the background of a shell hands on that it is to be ignored.
"""

import signal

from hypothesis import settings

settings.register_profile("kvslot", settings(deadline=None, print_blob=True))
settings.load_profile("kvslot")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
