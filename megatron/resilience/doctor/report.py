"""Runs every check on the facts and prints the result, for people or as one JSON object."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from megatron.resilience.doctor.check_device import check_device
from megatron.resilience.doctor.check_extras import check_extras
from megatron.resilience.doctor.check_machine import check_machine
from megatron.resilience.doctor.check_nccl import check_nccl
from megatron.resilience.doctor.check_origin import check_origin
from megatron.resilience.doctor.check_patches import check_patches
from megatron.resilience.doctor.check_versions import check_package, check_python
from megatron.resilience.doctor.facts import Facts
from megatron.resilience.doctor.finding import Finding, Status
from resihp_ext.errors import EXIT_FAILURE, EXIT_OK


def examine(facts: Facts) -> list[Finding]:
    """Apply every check; pure."""
    return [
        check_python(facts.python),
        *(check_package(package) for package in facts.packages),
        *(check_origin(origin) for origin in facts.origins),
        *check_device(facts.device),
        check_nccl(facts.device),
        *check_patches(facts.patches, facts.patches_error),
        *check_extras(facts.extras),
        *check_machine(facts.machine),
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing fails, else 1."""
    failed = any(finding.status is Status.FAIL for finding in findings)
    return EXIT_FAILURE if failed else EXIT_OK


def as_json(findings: Sequence[Finding]) -> str:
    """One line: ``{"ok": bool, "findings": [{check, status, summary, remedy}, ...]}``."""
    return json.dumps(
        {"ok": exit_code(findings) == EXIT_OK, "findings": [asdict(each) for each in findings]}
    )


def as_text(findings: Sequence[Finding]) -> str:
    """One line a finding, and a closing line that counts them."""
    width = max(len(finding.check) for finding in findings)
    lines = [
        f"{finding.status:<4}  {finding.check:<{width}}  {finding.summary}"
        + (f" -> {finding.remedy}" if finding.remedy else "")
        for finding in findings
    ]
    counts = [(status, sum(each.status is status for each in findings)) for status in Status]
    lines.append("doctor: " + ", ".join(f"{count} {status}" for status, count in counts if count))
    return "\n".join(lines)
