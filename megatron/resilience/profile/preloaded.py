"""What the fork server imports before it forks the ranks of a profile; never called."""

import logging
import warnings

# Both say at every import which optional packages and compilers are not there.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.resilience.profile.bench  # noqa: F401
