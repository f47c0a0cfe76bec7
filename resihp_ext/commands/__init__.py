"""What ``resihp status``, ``resihp drain`` and ``resihp join`` do with a running job."""
