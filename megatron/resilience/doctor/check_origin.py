"""From where ``megatron`` is imported: a checkout on the path shadows the wheel silently."""

from megatron.resilience.doctor.facts import OriginFacts
from megatron.resilience.doctor.finding import Finding, fail, ok, warn


def check_origin(origin: OriginFacts) -> Finding:
    """The installed wheel, and nothing else, must be what an import finds."""
    if origin.shadow is not None:
        return fail(
            origin.module,
            f"{origin.shadow} turns the shared namespace into an ordinary package",
            f"delete {origin.shadow} or take its folder off PYTHONPATH",
        )
    if origin.found is None:
        return fail(origin.module, "cannot be imported", "pip install megatron-core (make .venv)")
    if origin.expected is None:
        return warn(
            origin.module,
            f"{origin.found}, but no installed megatron-core wheel vouches for it",
            "install megatron-core from PyPI (make .venv)",
        )
    if origin.found != origin.expected:
        return fail(
            origin.module,
            f"comes from {origin.found}, which shadows {origin.expected}",
            f"take {origin.found} off PYTHONPATH and out of the working folder",
        )
    return ok(origin.module, origin.found)
