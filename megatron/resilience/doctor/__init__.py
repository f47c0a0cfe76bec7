"""``resihp doctor``: is this machine, with what is installed on it, fit to run a job?

``facts`` says what is looked at, ``gather*`` look (the only part that touches the machine), each
``check_*`` module turns facts into findings (pure), ``report`` runs and prints them.
"""
