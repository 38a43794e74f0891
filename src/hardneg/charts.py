"""Charts as inline SVG: lines over training, histograms of two kinds, dots of every seed. Strings in, strings out.

Colours are CSS classes (``c0`` to ``c7``), so that STYLE decides what they are in light and in dark; they can be told
apart by colour-blind people, and no chart relies on them alone. Charts with a
``viewBox`` are drawn for cards of about 360 pixels, where their text is as large as the page's small print; the dot
plot has percentages for coordinates and is as wide as the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]
Format = Callable[[float], str]

NUM_COLOURS = 8
WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 26, 20, 36
MOST_POINTS = 100


@dataclass(frozen=True)
class Line:
    """One arm: its mean, the seeds behind it, and possibly a dashed companion."""

    label: str  # short, at the end of the line
    title: str  # long, in the tooltip
    colour: int
    points: list[Point]
    seeds: list[list[Point]] = field(default_factory=list)
    dashed: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Dots:
    """One arm of the dot plot: a value per seed, their mean and half of its interval (None where unknown)."""

    label: str
    title: str
    colour: int
    values: dict[int, float]
    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Axis:
    """A range with round ticks, and where they fall on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, -0.02), 1.02)

    def ticks(self, most: int = 5) -> list[float]:
        return ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high]: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def padded(values: Sequence[float], *, floor: float | None = None, share: float = 0.06) -> tuple[float, float]:
    """A range around the values that is never empty; it does not go below ``floor``."""
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    low, high = low - room, high + room
    return (low if floor is None else max(low, floor)), high


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points: neighbours are averaged, and the last one is kept."""
    if len(points) <= most:
        return points
    size = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[at : min(at + size, len(points) - 1)] for at in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups] + [points[-1]]


def line_chart(name: str, lines: list[Line], unit: str, show: Format, *, floor: float | None = None) -> str:
    """Lines over training steps, the seeds thin behind their mean, each line named at its end."""
    drawn = [p for line in lines for part in (line.points, line.dashed, *line.seeds) for p in part]
    x = Axis(min(p[0] for p in drawn), max(p[0] for p in drawn), LEFT, WIDTH - RIGHT)
    if x.low == x.high:
        x = Axis(x.low - 1, x.high + 1, LEFT, WIDTH - RIGHT)
    y = Axis(*padded([p[1] for p in drawn], floor=floor), HEIGHT - BOTTOM, TOP)
    body = [_grid(x, y, unit, "training step", _plain_number, show)]
    for line in lines:
        thin = "".join(_path(thinned(seed), x, y, "seed") for seed in line.seeds if len(line.seeds) > 1)
        dashed = _path(thinned(line.dashed), x, y, "dashed") if line.dashed else ""
        points = thinned(line.points)
        hits = "".join(_hit(p, x, y, f"{line.title}, step {p[0]:.0f}: {show(p[1])}") for p in points)
        body.append(f'<g class="c{line.colour % NUM_COLOURS}">{thin}{dashed}{_path(points, x, y, "mean")}{hits}</g>')
    body.append(_end_labels(lines, x, y))
    ends = "; ".join(f"{line.title} ends at {show(line.points[-1][1])}" for line in lines if line.points)
    return _svg(f"{name} over training steps. {ends}.", "".join(body))


def histogram_chart(
    name: str, edges: list[float], same: list[float], other: list[float], means: tuple[float, float], highest: float
) -> str:
    """Shares of same-class and of other-class pairs over their similarity, with their means marked."""
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - 12)
    y = Axis(0.0, highest * 1.18, HEIGHT - BOTTOM, TOP)
    body = [_grid(x, y, "share of pairs", "cosine similarity", lambda v: f"{v:.4g}", lambda v: f"{100 * v:.0f} %")]
    labels = []
    kinds = (("other", other, means[0]), ("same", same, means[1]))
    swapped = means[1] < means[0]
    for kind, shares, mean in kinds:
        corners = [c for i, s in enumerate(shares) for c in ((edges[i], s), (edges[i + 1], s))]
        outline = " L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in corners)
        base, at = y(0.0), x(mean)
        body.append(
            f'<g class="{kind}"><title>{kind}-class pairs: mean similarity {mean:.3f}</title>'
            f'<path class="area" d="M{x(edges[0]):.1f} {base:.1f} L{outline} L{x(edges[-1]):.1f} {base:.1f}Z"/>'
            f'<line class="middle" x1="{at:.1f}" x2="{at:.1f}" y1="{base:.1f}" y2="{TOP + 14}"/></g>'
        )
        left = (kind == "other") != swapped
        side, shift = ("end", -5) if left else ("start", 5)
        if (left and at - LEFT < 70) or (not left and WIDTH - 12 - at < 70):  # no room on its own side of the line
            side, shift = ("start", 5) if left else ("end", -5)
        row = TOP + 12 if kind == "same" else TOP + 25
        labels.append(
            f'<text class="halo {kind}" x="{at + shift:.1f}" y="{row}" text-anchor="{side}">{kind} {mean:.2f}</text>'
        )
    told = f"{name}: same-class pairs have mean similarity {means[1]:.3f}, other-class pairs {means[0]:.3f}."
    return _svg(told, "".join([*body, *labels]))


def dot_plot(name: str, rows: list[Dots], unit: str, show: Format) -> str:
    """Every seed as a dot, the mean with its interval, and thin lines that join the same seed in all arms."""
    axis, step, top = _dot_axis(rows), 52, 6
    height = top + step * len(rows) + 40
    base = top + step * len(rows) + 2
    body = [
        f'<line class="grid" x1="{axis(t):.2f}%" x2="{axis(t):.2f}%" y1="{top}" y2="{base}"/>'
        f'<text x="{axis(t):.2f}%" y="{base + 15}" text-anchor="middle">{escape(_plain_number(t))}</text>'
        for t in axis.ticks(7)
    ]
    body.append(f'<text x="50%" y="{base + 33}" text-anchor="middle">{escape(unit)}</text>')
    heights = [top + step * i + 35 for i in range(len(rows))]
    body += [_pairing(axis, *pair) for pair in zip(rows, rows[1:], heights, heights[1:], strict=False)]
    body += [_dot_row(axis, row, y, show) for row, y in zip(rows, heights, strict=True)]
    told = "; ".join(f"{row.title}: mean {show(row.mean)}" for row in rows)
    label = escape(f"{name}. {told}.", quote=True)
    return f'<svg class="dots" role="img" aria-label="{label}" width="100%" height="{height}">{"".join(body)}</svg>'


def _dot_axis(rows: list[Dots]) -> Axis:
    """Around the dots; an interval may add as much again on either side, and is cut beyond that."""
    values = [value for row in rows for value in row.values.values()]
    low, high = min(values), max(values)
    span = max(high - low, 0.5)
    reach = [(row.mean - (row.half_width or 0.0), row.mean + (row.half_width or 0.0)) for row in rows]
    low = max(min(low, *(r[0] for r in reach)), low - span)
    high = min(max(high, *(r[1] for r in reach)), high + span)
    return Axis(*padded([low, high], share=0.05), 0.0, 100.0)


def _dot_row(axis: Axis, row: Dots, y: float, show: Format) -> str:
    half = row.half_width or 0.0
    low, high = row.mean - half, row.mean + half
    ends = "".join(
        f'<line class="interval" x1="{axis(end):.2f}%" x2="{axis(end):.2f}%" y1="{y - 5}" y2="{y + 5}"/>'
        for end in (low, high)
        if half and axis.low <= end <= axis.high
    )
    bar = f'<line class="interval" x1="{axis(low):.2f}%" x2="{axis(high):.2f}%" y1="{y}" y2="{y}"/>' if half else ""
    dots = "".join(
        f'<circle class="dot" cx="{axis(v):.2f}%" cy="{y}" r="4.5"><title>'
        f"{escape(f'{row.title}, seed {seed}: {show(v)}')}</title></circle>"
        for seed, v in row.values.items()
    )
    told = f"{row.title}: mean {show(row.mean)}" + (f", 95 % interval {show(low)} to {show(high)}" if half else "")
    middle = (
        f'<line class="centre" x1="{axis(row.mean):.2f}%" x2="{axis(row.mean):.2f}%" y1="{y - 10}" y2="{y + 10}">'
        f"<title>{escape(told)}</title></line>"
    )
    label = f'<text class="halo name" x="0" y="{y - 17}">{escape(row.label)}</text>'
    return f'<g class="c{row.colour % NUM_COLOURS}">{bar}{ends}{dots}{middle}</g>{label}'


def _pairing(axis: Axis, upper: Dots, lower: Dots, y1: float, y2: float) -> str:
    return "".join(
        f'<line class="pair" x1="{axis(v):.2f}%" x2="{axis(lower.values[seed]):.2f}%" y1="{y1}" y2="{y2}"/>'
        for seed, v in upper.values.items()
        if seed in lower.values
    )


def _grid(x: Axis, y: Axis, y_unit: str, x_unit: str, show_x: Format, show_y: Format) -> str:
    across = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{x.end}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(t) + 4:.1f}" text-anchor="end">{escape(show_y(t))}</text>'
        for t in y.ticks(5)
    )
    along = "".join(
        f'<line class="tick" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{y.start}" y2="{y.start + 4}"/>'
        f'<text x="{x(t):.1f}" y="{y.start + 16}" text-anchor="middle">{escape(show_x(t))}</text>'
        for t in x.ticks(5)
    )
    axis = f'<line class="tick" x1="{LEFT}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>'
    named = (
        f'<text class="unit" x="2" y="11">{escape(y_unit)}</text>'
        f'<text class="unit" x="{x.end}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_unit)}</text>'
    )
    return across + along + axis + named


def _end_labels(lines: list[Line], x: Axis, y: Axis) -> str:
    """The names of the lines at their ends, moved apart where they would cover each other."""
    named = [line for line in lines if line.points and line.label]
    wanted = sorted(((y(line.points[-1][1]), line) for line in named), key=lambda one: one[0])
    return "".join(
        f'<text class="end c{line.colour % NUM_COLOURS}" x="{x.end + 6}" y="{at + 4:.1f}">{escape(line.label)}</text>'
        for at, line in zip(_spread([at for at, _ in wanted], 13.0), (line for _, line in wanted), strict=True)
    )


def _spread(places: list[float], gap: float) -> list[float]:
    """Sorted places at least ``gap`` apart, moved as little as a pass down and a pass up need."""
    placed = list(places)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    lowest = HEIGHT - BOTTOM
    for i in reversed(range(len(placed))):
        limit = lowest if i == len(placed) - 1 else placed[i + 1] - gap
        placed[i] = min(placed[i], limit)
    return placed


def _path(points: list[Point], x: Axis, y: Axis, kind: str) -> str:
    if not points:
        return ""
    if len(points) == 1:
        return f'<circle class="only" cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3"/>'
    return f'<polyline class="{kind}" points="{" ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)}"/>'


def _hit(point: Point, x: Axis, y: Axis, told: str) -> str:
    place = f'cx="{x(point[0]):.1f}" cy="{y(point[1]):.1f}"'
    return f'<circle class="hit" {place} r="6"><title>{escape(told)}</title></circle>'


def _svg(label: str, body: str) -> str:
    return (
        f'<svg class="chart" role="img" aria-label="{escape(label, quote=True)}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"{body}</svg>"
    )


def _plain_number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value == round(value) else f"{value:.6g}"


STYLE = """
:root{--paper:#fbfaf8;--card:#fff;--ink:#1d2126;--dim:#5b626b;--rule:#dedbd5;--soft:#f1eee9;--warn:#fff4dc;
  --edge:#c98a00;--bad:#c4261d;--c0:#0067a5;--c1:#c94f00;--c2:#007f5c;--c3:#a83a80;--c4:#8a6400;--c5:#5450c8;
  --c6:#5c6570;--c7:#8a4b2a}
@media(prefers-color-scheme:dark){
:root{--paper:#14171b;--card:#1c2026;--ink:#e8e6e1;--dim:#a2a9b3;--rule:#343a43;--soft:#242932;--warn:#33290f;
  --edge:#d9a62e;--bad:#ff6b5e;--c0:#62b8f5;--c1:#ff8f52;--c2:#3fcf9f;--c3:#ee93ca;--c4:#e4b843;--c5:#a9a6ff;
  --c6:#aeb6c0;--c7:#d3a07e}}*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:clamp(1.6rem,4.5vw,2.3rem);line-height:1.15;margin:.2em 0 .4em;letter-spacing:-.015em}
h2{font-size:1.05rem;margin:0 0 .4em}
h2.h{font-size:1.35rem;margin:2.2em 0 .6em;letter-spacing:-.01em}h3{font-size:.98rem;margin:0 0 .5em}
h4{font-size:.75rem;font-weight:500;color:var(--dim);margin:0 0 3px}section>h3{margin-top:1.6em}
p{margin:.5em 0;max-width:78ch}.lead{font-size:1.12rem;line-height:1.6}
.side{display:block;margin:.15em 0 .15em .9em}
.small,figcaption{font-size:.84rem;color:var(--dim)}
code{font:.88em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{background:var(--soft);border:1px solid var(--rule);border-radius:8px;padding:12px 14px;white-space:pre-wrap;
  margin:.5em 0}ul{padding-left:1.2em;margin:.4em 0}li{margin:.25em 0}ul.arms,ul.said{list-style:none;padding:0}
ul.said li{margin:.5em 0}figcaption{margin-top:6px}
.row{display:flex;gap:8px;align-items:baseline;min-width:190px}
.box{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 18px;margin:16px 0}
.box p,.box li{max-width:95ch}
.warn{background:var(--warn);border-color:var(--edge)}
.badge{display:inline-block;min-width:1.45em;padding:0 .3em;border-radius:5px;font-weight:700;font-size:.82em;
  line-height:1.45;text-align:center;color:var(--card);cursor:default}.b0{background:var(--c0)}
.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}.b4{background:var(--c4)}
.b5{background:var(--c5)}.b6{background:var(--c6)}.b7{background:var(--c7)}.c0{color:var(--c0)}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.c6{color:var(--c6)}.c7{color:var(--c7)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:10px}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:8px 10px;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule)}
tbody tr:last-child>*{border-bottom:0}
thead th{font-weight:500;color:var(--dim);font-size:.78rem;line-height:1.3;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:400}td.mean,td.against{white-space:nowrap}
td.seeds{min-width:170px}
td.seeds span{display:inline-block;margin-left:.45em}
.tag{display:block;font-size:.75rem;color:var(--dim)}
.tag.above,.tag.below{color:var(--ink);font-weight:700}table.plain{width:auto;background:none}
table.plain th,table.plain td{text-align:left;padding:4px 16px 4px 0;overflow-wrap:anywhere}
#measures td,#measures thead th+th{text-align:right}#measures th{overflow-wrap:normal}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 14px 10px;margin:0;
  min-width:0}
.card.wide{margin:16px 0;padding:16px 22px 12px}.card h3 code{font-weight:500}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:16px}
svg{display:block;overflow:visible}svg.chart{width:100%;height:auto}svg text{font-size:11.5px;fill:var(--dim)}
svg .grid{stroke:var(--rule);stroke-width:1}svg .tick{stroke:var(--dim);stroke-width:1}
svg .mean,svg .seed,svg .dashed{fill:none;stroke:currentColor;stroke-linejoin:round;stroke-linecap:round}
svg .mean{stroke-width:2.2}svg .seed{stroke-width:1;opacity:.35}
svg .dashed{stroke-width:1.6;stroke-dasharray:2 4}svg .only{fill:currentColor}svg .hit{fill:transparent}
svg .hit:hover{fill:currentColor}
svg text.end{fill:currentColor;font-weight:700;font-size:12.5px}
svg .halo{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
svg text.name{fill:var(--ink);font-size:13px;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
svg .dot{fill:currentColor;fill-opacity:.45;stroke:currentColor;stroke-width:1.5}
svg .interval{stroke:currentColor;stroke-width:1.6;opacity:.75}
svg .centre{stroke:currentColor;stroke-width:4;stroke-linecap:round}
svg .pair{stroke:var(--dim);stroke-width:1;opacity:.4}svg .same{color:var(--c0)}svg .other{color:var(--c1)}
svg text.same,svg text.other{fill:currentColor;font-weight:600}
svg .area{fill:currentColor;fill-opacity:.22;stroke:currentColor;stroke-width:1.6}
svg .other .area{stroke-dasharray:4 2}
svg .middle{stroke:currentColor;stroke-width:1.4;stroke-dasharray:3 3}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;align-items:center;max-width:none}.legend span{max-width:100%}
.key{width:20px;height:12px;border-radius:2px;display:inline-block;margin-right:-10px}
.key.same{background:var(--c0)}.key.other{background:var(--c1)}
.words{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:14px 26px;margin:0}
.words dt{font-weight:700;font-size:.93rem}
.words dd{margin:0;font-size:.89rem;color:var(--dim)}.anchors{display:grid;gap:12px}
.anchor{display:flex;gap:20px;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px}
.who{flex:none;width:92px;text-align:center;font-size:.84rem}.who img{width:88px;height:88px}
.strips{display:flex;flex-wrap:wrap;gap:8px 26px;min-width:0}
.strip>div{display:flex;flex-wrap:wrap;gap:5px}
.strip figure{margin:0;width:64px;text-align:center;position:relative}
.strip figcaption{font-size:.7rem;line-height:1.3;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
img{display:block;margin:0 auto;border-radius:4px;object-fit:contain;background:#000}
img.tiny{image-rendering:pixelated}
.strip img{width:62px;height:62px;border:3px solid transparent;background-clip:padding-box}
.strip .false img{border-color:var(--bad)}
.strip .false::after{content:"\\00d7";position:absolute;top:0;right:1px;width:15px;height:15px;
  border-radius:0 4px 0 5px;background:var(--bad);color:var(--card);font:700 13px/14px system-ui,sans-serif}
.strip .false figcaption{color:var(--bad);font-weight:700}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:6px 30px;margin-top:12px}
details{margin:8px 0}
summary{cursor:pointer;font-weight:600;font-size:.93rem}
@media(max-width:760px){
main{padding:16px 14px 40px}.card.wide{padding:14px 16px 10px}
#results,#results tbody,#results tr,#results th,#results td{display:block}#results thead{display:none}
#results tr{padding:12px 14px;border-bottom:1px solid var(--rule)}#results tr:last-child{border-bottom:0}
#results th{padding:0 0 6px;border:0}
#results td{display:flex;justify-content:space-between;gap:14px;border:0;padding:3px 0;white-space:normal}
#results td::before{content:attr(data-label);color:var(--dim);text-align:left;flex:1 1 45%}
#results td.seeds{display:block;text-align:right}#results td.seeds::before{display:block}
#results td:empty{display:none}#results .tag{display:block}#measures th,#measures td{padding-right:9px}
.anchor{flex-direction:column;gap:10px}
.who{width:auto;display:flex;align-items:center;gap:12px}.who img{margin:0;width:64px;height:64px}
.strip figure{width:37px}
.strip img{width:36px;height:36px;border-width:2px}.strip>div{gap:4px}}
@media print{
body{background:#fff}.card,.anchor,.box{break-inside:avoid}}
"""
