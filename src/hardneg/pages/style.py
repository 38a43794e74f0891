"""How every page looks: light and dark, wide and narrow, and on paper."""

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
.row{display:flex;gap:8px;align-items:baseline;min-width:min(190px,70vw)}
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
th,td{padding:8px 8px;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule)}
tbody tr:last-child>*{border-bottom:0}
thead th{font-weight:500;color:var(--dim);font-size:.78rem;line-height:1.3;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:400}td.mean,td.against{white-space:nowrap}
td.seeds{min-width:145px}
td.seeds span{display:inline-block;margin-left:.45em}
.sideways{overflow-x:auto}
.tag{display:block;font-size:.75rem;color:var(--dim)}
.tag.above,.tag.below{color:var(--ink);font-weight:700}table.plain{width:auto;background:none}
table.plain th,table.plain td{text-align:left;padding:4px 16px 4px 0;overflow-wrap:anywhere}
#measures td,#measures thead th+th{text-align:right}#measures th,#measures td{overflow-wrap:normal}
#measures td{white-space:nowrap}
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
@media(max-width:1100px){
#results th,#results td{padding:8px 5px}#results{font-size:.82rem}#results .row{min-width:110px}
#results td.seeds{min-width:56px}#results thead th{font-size:.72rem}}
@media(max-width:860px){
main{padding:16px 14px 40px}.card.wide{padding:14px 16px 10px}
#results,#results tbody,#results tr,#results th,#results td{display:block}#results thead{display:none}
#results tr{padding:12px 14px;border-bottom:1px solid var(--rule)}#results tr:last-child{border-bottom:0}
#results{font-size:.88rem}#results th{padding:0 0 6px;border:0}
#results td{display:flex;justify-content:space-between;gap:14px;border:0;padding:3px 0;min-width:0;white-space:normal}
#results td::before{content:attr(data-label);color:var(--dim);text-align:left;flex:1 1 45%}
#results td.seeds{display:block;text-align:right}#results td.seeds::before{display:block}
#results td:empty{display:none}#results .sideways{overflow-x:auto}
.tag{display:block}#measures th,#measures td{padding-right:8px}
#measures td{font-size:.82rem}#measures thead th{font-size:.68rem}
.anchor{flex-direction:column;gap:10px}
.who{width:auto;display:flex;align-items:center;gap:12px}.who img{margin:0;width:64px;height:64px}
.strip figure{width:37px}
.strip img{width:36px;height:36px;border-width:2px}.strip>div{gap:4px}}
@media print{
body{background:#fff}.card,.anchor,.box{break-inside:avoid}}
"""
