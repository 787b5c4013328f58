"""The results of a batch as a labelled contact sheet and as a gallery that filters, in one HTML file."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from .run import rows_of

LABEL = 34
_PAGE = """<!doctype html><meta charset="utf-8"><title>Anima gallery</title>
<style>body{{font:14px sans-serif;background:#1c1c1c;color:#ddd;margin:16px}}input{{width:60%;padding:6px}}
main{{display:flex;flex-wrap:wrap;gap:10px;margin-top:12px}}figure{{margin:0;width:{side}px}}img{{width:100%}}
figcaption{{font-size:11px;overflow-wrap:anywhere}}[hidden]{{display:none}}</style>
<input id="filter" placeholder="filter: words that all must occur" autofocus> <span id="count"></span>
<main>{figures}</main>
<script>
const figures = [...document.querySelectorAll("figure")];
function show() {{
  const words = document.getElementById("filter").value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const figure of figures) {{
    figure.hidden = !words.every(word => figure.dataset.text.includes(word));
    shown += !figure.hidden;
  }}
  document.getElementById("count").textContent = `${{shown}} of ${{figures.length}}`;
}}
document.getElementById("filter").addEventListener("input", show);
show();
</script>
"""


def label_of(job: dict[str, Any]) -> str:
    """What tells a job from the others, in one line."""
    rest = " ".join(f"{key}={value}" for key, value in job.items() if key not in ("prompt", "negative"))
    return f"{job['prompt']} | {rest}"


def contact_sheet(folder: Path, target: Path, columns: int, side: int) -> None:
    """A PNG of all pictures with their labels."""
    from PIL import Image, ImageDraw

    rows = rows_of(folder)
    columns = max(1, min(columns, len(rows)))
    sheet = Image.new("RGB", (columns * side, -(-len(rows) // columns) * (side + LABEL)), (28, 28, 28))
    pen = ImageDraw.Draw(sheet)
    for index, row in enumerate(rows):
        x, y = index % columns * side, index // columns * (side + LABEL)
        with Image.open(folder / row["file"]) as picture:
            picture.thumbnail((side, side))
            sheet.paste(picture, (x, y))
        text = label_of(row["job"])
        width = max(4, side // 6)
        for line in range(2):
            pen.text((x + 3, y + side + 3 + 15 * line), text[line * width : (line + 1) * width], fill=(220, 220, 220))
    sheet.save(target)


def gallery(folder: Path, target: Path, side: int) -> None:
    """A self-contained HTML page: pictures inside, a box that filters by words."""
    figures = []
    for row in rows_of(folder):
        picture = base64.b64encode((folder / row["file"]).read_bytes()).decode()
        label = html.escape(label_of(row["job"]))
        figures.append(
            f'<figure data-text="{label.lower()}"><img loading="lazy" alt="{label}" src="data:image/png;base64,{picture}">'
            f"<figcaption>{label}</figcaption></figure>"
        )
    target.write_text(_PAGE.format(side=side, figures="\n".join(figures)), encoding="utf-8")
