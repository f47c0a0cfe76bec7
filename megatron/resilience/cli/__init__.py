"""The ``resihp`` command line."""
