"""What ``resihp status``, ``top``, ``drain`` and ``join`` do with a running job."""
