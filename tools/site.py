"""Hooks of mkdocs.yml: pages whose text lies elsewhere in the repository, and links that lead to them."""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {  # file in the repository: page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "deploy/README.md": "deploy.md",
    "examples/choose_a_format.ipynb": "notebook.md",
    "benchmarks/results/README.md": "results.md",
    "benchmarks/results/cpu-kernels.md": "cpu-kernels.md",
    "benchmarks/results/gpu-h200.md": "gpu-h200.md",
    "benchmarks/results/gpu-counted.md": "gpu-counted.md",
    "benchmarks/results/peers.md": "peers-results.md",
    "benchmarks/results/reliability.md": "reliability-results.md",
}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of PAGES to those of docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        path = ROOT / source
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to where the site has the file; what only the repository has is named, not linked."""
    source = next((s for s, p in PAGES.items() if p == page.file.src_uri), f"docs/{page.file.src_uri}")
    page_folder = posixpath.dirname(page.file.src_uri)
    return re.sub(r"\[([^\]]*)" + LINK.pattern, lambda found: site_link(found, source, page_folder), markdown)


def site_link(found: re.Match[str], source: str, page_folder: str = "") -> str:
    """The Markdown of one link of a repository's file, as the site has it."""
    text, target, anchor = found[1], found[2], found[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = PAGES.get(path) or (path[5:] if path.startswith("docs/") else None)
    if page and page.endswith((".md", ".svg", ".png")):
        return f"[{text}]({posixpath.relpath(page, page_folder or '.')}{anchor})"
    return f"{text} (`{path}`)"


def notebook_page(path: Path) -> str:
    """A notebook with its saved outputs as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [output_text(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def output_text(output: dict[str, Any]) -> str:
    """One saved output: a drawing as an image in the page, everything else as the text it is."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        svg = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="figure" src="data:image/svg+xml;base64,{svg}">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"
