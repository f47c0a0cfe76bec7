"""The report: one page that needs nothing else, and its pictures as files.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp_ext.report import chart as drawn
from resihp_ext.report import page as html
from resihp_ext.report.svg import alone
from resihp_ext.reproduce.figure import Bars, Claim, Figure, Lines, Scale

HEAD = ("figure", "quantity", "ours", "paper", "ours / paper", "verdict")


def picture(chart: Bars | Lines) -> str:
    """An SVG."""
    if isinstance(chart, Bars):
        names = [name for name, _ in chart.series]
        groups = [
            drawn.Group(
                label=label,
                values=[values[place] for _, values in chart.series],
                ranges=[pairs[place] for pairs in chart.ranges] if chart.ranges else (),
            )
            for place, label in enumerate(chart.groups)
        ]
        return drawn.bars(chart.title, chart.unit, names, groups, published="paper")
    series = [
        drawn.Series(
            name=name,
            points=[(x, y) for x, y in zip(chart.x, values, strict=True) if y is not None],
            dashed=bool(place % 2) and len(chart.series) > 1,
        )
        for place, (name, values) in enumerate(chart.series)
    ]
    return drawn.lines(chart.title, chart.across, chart.unit, series, from_zero=chart.from_zero)


def pictures(figures: Sequence[Figure]) -> dict[str, str]:
    """By name of the file."""
    return {
        f"{one.name}-{number}.svg": alone(picture(chart), html.FILE_STYLE)
        for one in figures
        for number, chart in enumerate(one.charts, 1)
    }


def span(low: float, high: float, unit: str) -> str:
    """A range in words."""
    if low > high:
        return "-"
    ends = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
    return f"{ends}{unit if unit == 'x' or not unit else ' ' + unit}"


def paper_span(claim: Claim) -> str:
    """The paper's range in words."""
    low, high = claim.paper
    if claim.better == "low" and low == 0 < high:
        return f"up to {high:.3g}{' ' + claim.unit if claim.unit else ''}"
    return span(low, high, claim.unit)


def claim_row(figure: Figure, claim: Claim) -> tuple[str, ...]:
    """In :data:`HEAD`."""
    ratio = "-" if claim.ratio is None else f"{claim.ratio:.2f}"
    ours = span(*claim.ours, claim.unit)
    return (figure.source, claim.quantity, ours, paper_span(claim), ratio, claim.verdict)


def page(figures: Sequence[Figure], scale: Scale) -> str:
    """HTML."""
    claims = [(figure, claim) for figure in figures for claim in figure.claims]
    rows = [claim_row(figure, claim) for figure, claim in claims]
    whys = [f"{claim.quantity}: {claim.why}" for _, claim in claims if claim.why]
    summary = [
        "Every figure is made by the simulator from the same planners, detectors and schedules "
        "that run in jobs. Nothing here was measured on the paper's testbed. Its full text was not "
        "at hand: where it does not say how something was set up, the setup is ours and said so, "
        "and baselines are written from their own sources and not weakened.",
        f"{sum(claim.within for _, claim in claims)} of {len(claims)} figures lie inside the "
        f"paper's ranges, {sum(c.touches and not c.within for _, c in claims)} overlap them.",
    ]
    sections = []
    if claims:
        parts = [html.table(HEAD, rows), *(html.paragraph(why) for why in whys)]
        sections.append(html.section("Ours beside the paper's", *parts))
    sections += [_section(one) for one in figures]
    badges = ("simulated", *(("small: no reproduction",) if scale.small else ()))
    return html.page("ResiHP's tables and figures", summary, sections, badges=badges)


def _section(one: Figure) -> str:
    parts = [html.paragraph(note) for note in one.notes]
    parts += [html.figure(picture(chart), chart.title) for chart in one.charts]
    if one.claims:
        rows = [claim_row(one, claim) for claim in one.claims]
        parts.append(html.table(HEAD[1:], [row[1:] for row in rows]))
        parts += [html.paragraph(f"{c.quantity}: {c.why}") for c in one.claims if c.why]
    whole = html.table(one.columns, one.rows)
    parts.append(f"<details><summary>{len(one.rows)} rows</summary>{whole}</details>")
    return html.section(f"{one.title} ({one.source})", *parts)
