"""From text to Megatron's ``.bin``/``.idx``: sources -> chunks -> workers -> writer -> report.

Read in this order: ``config`` (what can be asked), ``records`` (what travels), ``streams`` and
``sources`` (what is read), ``chunks`` (how it is cut), ``work`` and ``encoders`` (what a worker
does), ``pool`` (who does it), ``writer`` (how it reaches the disk), ``report``, ``run`` (all).
"""
