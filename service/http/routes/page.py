"""The front page: what this is, how to ask it, and which models it has. One file, nothing loaded from elsewhere.

Where a key is needed, the page is the same for everybody and asks for one, with which it lists the models.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape
from itertools import groupby

from fxcore.models.catalog import ModelEntry

_TITLES = {
    "classification": "Classification",
    "quantization": "Classification, int8",
    "segmentation": "Segmentation",
    "detection": "Detection",
    "video": "Video",
    "optical_flow": "Optical flow",
}


def write(models: Iterable[ModelEntry] | None) -> bytes:
    """The page as UTF-8 HTML; without ``models``, one that asks for a key."""
    page = _PAGE.replace("{style}", _STYLE).replace("{script}", _SCRIPT).replace("{origin}", _ORIGIN)
    return page.replace("{models}", _ASKING if models is None else _links(models)).encode()


def _links(models: Iterable[ModelEntry]) -> str:
    by_task = sorted(models, key=lambda entry: (list(_TITLES).index(entry.task), entry.name))
    sections = []
    for task, entries in groupby(by_task, key=lambda entry: entry.task):
        links = "\n".join(
            f'<li><a href="/v1/models/{escape(entry.name, quote=True)}/graph?format=svg">{escape(entry.name)}</a></li>'
            for entry in entries
        )
        sections.append(f"<h3>{_TITLES[task]}</h3>\n<ul class=models>\n{links}\n</ul>")
    return "\n".join(["<p>Each name leads to its graph.</p>", *sections])


_STYLE = """:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 3rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h3 { margin: 1.2rem 0 .3rem; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; overflow-x: auto;
      font-size: 14px; }
ul.models { columns: 14rem; padding-left: 1.1rem; margin: 0; font-size: 15px; }
nav a { margin-right: 1rem; }
"""
_SCRIPT = """for (const e of document.querySelectorAll(".origin")) e.textContent = location.origin
const form = document.querySelector("form")
form?.addEventListener("submit", async (event) => {
  event.preventDefault()
  const key = form.elements.key.value
  const answer = await fetch("/v1/models", { headers: { Authorization: `Bearer ${key}` } })
  const found = await answer.json()
  form.querySelector("output").textContent = answer.ok ? "" : found.detail
  document.querySelector("ul.models").replaceChildren(...(found.models ?? []).map(({ name }) => {
    const item = document.createElement("li")
    item.textContent = name
    return item
  }))
})
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: its own style and script run and ask this server, and nothing else."""

# Shown until the page's script has put the address in that the browser knows.
_ORIGIN = "<span class=origin>http://127.0.0.1:8000</span>"

_ASKING = """<form>
<label>This server needs an API key: <input name=key type=password autocomplete=off required></label>
<button>Show the models</button> <output></output>
</form>
<ul class=models></ul>"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fxserve</title>
<style>{style}</style>
</head>
<body>
<h1>fxserve</h1>
<p>Every inner activation of a vision model, over HTTP: list the nodes of its graph, name the ones you want, POST
images, get tensors.</p>
<nav><a href="/docs">Reference</a><a href="/openapi.json">OpenAPI</a><a href="/v1/models">Models</a>
<a href="/v1/extractors">Extractors</a><a href="/readyz">Ready?</a><a href="/metrics">Metrics</a></nav>

<h2>Try it</h2>
<p>What is inside a model:</p>
<pre>curl -s {origin}/v1/models/resnet50/nodes</pre>
<p>Two feature maps of a photograph (<code>weights=random</code> needs no download; leave it out for trained ones):</p>
<pre>curl -s -H 'Content-Type: image/jpeg' --data-binary @photo.jpg \\
  '{origin}/v1/models/resnet50/features?nodes=layer3:C4,layer4:C5&amp;weights=random'</pre>
<p>The same as a file for Python, <code>safetensors.torch.load_file("features.safetensors")</code>:</p>
<pre>curl -s -H 'Content-Type: image/jpeg' -H 'Accept: application/x-safetensors' --data-binary @photo.jpg \\
  '{origin}/v1/models/resnet50/features?nodes=C4,C5&amp;weights=random' -o features.safetensors</pre>
<p>Where it looks, as a picture:</p>
<pre>curl -s -H 'Content-Type: image/jpeg' -H 'Accept: image/png' --data-binary @photo.jpg \\
  '{origin}/v1/models/resnet50/features?nodes=C4&amp;weights=random' -o heatmap.png</pre>

<h2>Models</h2>
{models}
<script>{script}</script>
</body>
</html>
"""
