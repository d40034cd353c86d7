"""The style of the report's page: by day, by night, on paper, on a phone."""

STYLE = (
    """
:root{--ink:#1b1f24;--paper:#fff;--soft:#eef1f4;--line:#d0d7de;--dim:#57606a;
--startup:#d4a72c;--training:#2da44e;--alternate:#1f883d;--lost:#cf222e;--hung:#8250df;--down:#fa8f3e;--end:#8c959f;
--c0:#0969da;--c1:#bf3989;--c2:#8250df;--c3:#1b7c83;--c4:#9a6700;--c5:#116329;--c6:#a40e26;--c7:#57606a}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--soft:#161b22;--line:#30363d;--dim:#9198a1;
--startup:#d29922;--training:#3fb950;--alternate:#2ea043;--lost:#f85149;--hung:#bc8cff;--down:#f0883e;--end:#6e7681;
--c0:#58a6ff;--c1:#f778ba;--c2:#bc8cff;--c3:#39c5cf;--c4:#e3b341;--c5:#7ee787;--c6:#ff7b72;--c7:#b1bac4}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#fff;--line:#999;--dim:#333}
section{break-inside:avoid}svg rect,.key{print-color-adjust:exact;-webkit-print-color-adjust:exact}details>*{display:block}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.45 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.2rem 0 .8rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 .6rem}h3{font-size:1rem;margin:1rem 0 .3rem}p{margin:.3rem 0 .6rem;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);padding:1rem 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div{background:var(--soft);border-radius:.4rem;padding:.4rem .6rem;min-width:0}
dt{color:var(--dim);font-size:.8rem}dd{margin:0;overflow-wrap:anywhere}
.verdict{border:1px solid var(--lost);border-radius:.4rem;padding:.8rem}
pre{overflow-x:auto;background:var(--soft);padding:.6rem;font-size:.8rem}
.row{display:grid;grid-template-columns:minmax(6rem,14rem) 1fr;gap:.6rem;align-items:center;margin:.25rem 0}
.row>span{font-size:.85rem;overflow-wrap:anywhere}
svg{display:block;width:100%;background:var(--soft)}svg.bar{height:1.3rem}svg.chart{height:14rem}
.axis{display:flex;justify-content:space-between;color:var(--dim);font-size:.8rem}
.keys{display:flex;flex-wrap:wrap;gap:.3rem 1rem;font-size:.85rem}
.key{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem;border-radius:2px;vertical-align:-1px}
table{border-collapse:collapse;font-size:.9rem}th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;
border-bottom:1px solid var(--line)}th{color:var(--dim);font-weight:600}td:not(:last-child),th{white-space:nowrap}td:last-child{min-width:14rem}.totals td{min-width:0}
.wide{overflow-x:auto}.totals{margin-top:.8rem}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
polyline{fill:none;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
@media (max-width:40rem){.row{grid-template-columns:1fr;gap:.1rem}body{font-size:15px}}
"""
    + "".join(
        f".{name}{{fill:var(--{name});background:var(--{name})}}\n"
        for name in ("startup", "training", "alternate", "lost", "hung", "down", "end")
    )
    + "".join(
        f".phase{n}{{fill:var(--c{n});background:var(--c{n})}}.line{n}{{stroke:var(--c{n})}}i.line{n}{{background:var(--c{n})}}\n"
        for n in range(8)
    )
)
