"""Upstream symbols that the CPU device replaces: does each still look as its patch assumes?"""

from collections.abc import Sequence

from megatron.resilience.doctor.facts import PatchFacts
from megatron.resilience.doctor.finding import Finding, fail, info, ok, warn

APPLIES, DRIFTED, NOT_NEEDED = "applies", "drifted", "not needed"


def check_patches(patches: Sequence[PatchFacts] | None, error: str = "") -> list[Finding]:
    """One line for all patches that fit, one for each that does not."""
    if patches is None:
        reason = f": {error}" if error else ""
        return [info("patches", f"not available{reason}")]
    findings = [_problem(patch) for patch in patches if patch.status not in (APPLIES, NOT_NEEDED)]
    applying = sum(patch.status == APPLIES for patch in patches)
    idle = sum(patch.status == NOT_NEEDED for patch in patches)
    if not findings:
        findings.append(ok("patches", f"{applying} apply, {idle} not needed on this device"))
    return findings


def _problem(patch: PatchFacts) -> Finding:
    check = f"patch {patch.symbol}"
    if patch.status == DRIFTED:
        return fail(check, patch.detail, "install the pinned versions (make .venv)")
    return warn(check, f"unknown status {patch.status!r}: {patch.detail}", "update resihp")
