"""What all tests share: Hypothesis without deadlines, since a machine under load is no fault of ours.

Under CI Hypothesis itself takes fixed examples instead of fresh ones; what this profile does not name it leaves alone.
"""

from hypothesis import settings

settings.register_profile("kvslot", settings(deadline=None, print_blob=True))
settings.load_profile("kvslot")
