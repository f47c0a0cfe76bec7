"""Charts and pages: points lie where they should, text is text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from resihp_ext.report import chart, strips
from resihp_ext.report.page import page, section, table
from resihp_ext.report.svg import Scale, bounds, log_ticks, number, ticks

pytestmark = pytest.mark.unit
SPACE = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.93, 1.07) == pytest.approx([0.95, 1.0, 1.05])
    assert ticks(3, 3) == [3]
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1e-6, 1e3) == pytest.approx([10.0**e for e in range(-6, 4)])


def test_scales_go_from_end_to_end() -> None:
    scale = Scale(0, 4, 100, 20)
    assert [scale(0), scale(1), scale(4), scale(9)] == [100, 80, 20, 20]
    assert Scale(1, 100, 0, 10, log=True)(10) == 5


def test_bounds_leave_room_and_begin_at_zero_when_told() -> None:
    assert bounds([1.0, 2.0]) == (0.95, 2.05)
    assert bounds([1.0, 2.0], zero=True) == (0.0, 2.1)
    assert bounds([float("nan")]) == (0.0, 1.0)


def test_figures_are_short() -> None:
    assert [number(v) for v in (0, 0.25, 1500, 2e6, 1e-7)] == ["0", "0.25", "1,500", "2e6", "1e-7"]


def test_a_line_is_interrupted_where_there_is_no_value() -> None:
    series = chart.Series(name="loss", points=[(0, 1), (1, 2), (2, float("nan")), (3, 1), (4, 2)])
    svg = drawn(chart.lines("t", "step", "loss", [series]))
    lines = svg.findall(f"{SPACE}polyline")
    assert len(lines) == 2
    first = [tuple(map(float, p.split(","))) for p in lines[0].get("points", "").split()]
    assert first[0][0] == chart.LEFT
    assert first[0][1] > first[1][1], "larger values are higher up"


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    series = chart.Series(name="s", points=[(0, 1), (1, 0), (2, 10), (3, 100)])
    svg = drawn(chart.lines("t", "x", "y", [series], log_y=True))
    assert len(svg.findall(f"{SPACE}polyline")) == 1
    assert len(svg.findall(f"{SPACE}circle")) == 1


def test_marks_say_what_happened() -> None:
    mark = chart.Mark(x=1, words="rank <3> & others", kind="bad")
    svg = drawn(
        chart.lines("t", "x", "y", [chart.Series(name="a", points=[(0, 1), (2, 1)])], marks=[mark])
    )
    group = svg.find(f"{SPACE}g")
    assert group is not None
    title = group.find(f"{SPACE}title")
    assert title is not None
    assert title.text == "rank <3> & others"


def test_bars_stand_on_zero_and_show_what_was_published() -> None:
    groups = [
        chart.Group(label="mixed", values=[2.0, 1.0], ranges=[(1.0, 4.0), None]),
        chart.Group(label="stop", values=[None, 1.5]),
    ]
    svg = drawn(chart.bars("t", "times", ["ours", "theirs"], groups))
    boxes = [r for r in svg.iter(f"{SPACE}rect") if r.find(f"{SPACE}title") is not None]
    said = {(t.text or ""): r for r in boxes if (t := r.find(f"{SPACE}title")) is not None}
    assert set(said) == {
        "ours, mixed, published: 1 to 4",
        "ours, mixed: 2",
        "theirs, mixed: 1",
        "theirs, stop: 1.5",
    }
    high, low = (
        float(said[f"{n}, mixed: {v}"].get("height", 0)) for n, v in (("ours", 2), ("theirs", 1))
    )
    assert high == pytest.approx(2 * low, abs=0.05)


def test_stacks_slices_and_intervals_lie_on_their_scale() -> None:
    rows = [strips.Stack(label="a", parts=[1, 3]), strips.Stack(label="b", parts=[2, 0])]
    svg = drawn(strips.stacks("t", "s", ["x", "y"], rows))
    widths = [
        float(r.get("width", 0))
        for r in svg.iter(f"{SPACE}rect")
        if r.find(f"{SPACE}title") is not None
    ]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    one = strips.Slice(begin=0, end=1, colour="var(--c0)", words="F0")
    two = strips.Slice(begin=1, end=4, colour="var(--c1)", words="B0")
    svg = drawn(strips.gantt("t", "s", [strips.Row(label="0.0", slices=[one, two])]))
    first, second = (r for r in svg.iter(f"{SPACE}rect"))
    end = float(first.get("x", 0)) + float(first.get("width", 0))
    assert end == pytest.approx(float(second.get("x", 0)), abs=0.05)
    row = strips.Interval(label="joint", mean=0.95, low=0.94, high=0.97)
    assert "joint: 0.95 (0.94 to 0.97)" in strips.intervals("t", "goodput", [row])


def test_pages_stand_alone_and_escape() -> None:
    html = page("A & B", ["one <two>"], [section("S", table(["name", "s"], [["<x>", 1.5]]))])
    assert "A &amp; B" in html
    assert "one &lt;two&gt;" in html
    assert "&lt;x&gt;" in html
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_columns_of_figures_stand_right() -> None:
    html = table(
        ["policy", "ratio", "range"], [["joint", 1.25, "1.2 to 1.5"], ["none", None, "1x"]]
    )
    assert "<th>policy</th>" in html
    assert '<th class="n">ratio</th>' in html
    assert '<td class="n">1.2 to 1.5</td>' in html
    assert '<td class="n">-</td>' in html


def test_the_same_input_gives_the_same_bytes() -> None:
    series = [chart.Series(name=str(i), points=[(x, x * i) for x in range(5)]) for i in range(9)]
    assert chart.lines("t", "x", "y", series) == chart.lines("t", "x", "y", series)
