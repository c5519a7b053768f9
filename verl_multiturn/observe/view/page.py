"""The page for a browser, served or as one file.

Invariants:
- no build step: the server gives the modules as they lie in `static/`. The exported page has them one behind the other;
- nothing runs but these scripts: the policy names their origin, or their hashes. Nothing is requested from another
  host.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from verl_multiturn.describe import one_line

STATIC = Path(__file__).parent / "static"
MODULES = (
    "lib.js", "query.js", "data.js", "tokens.js", "chart.js", "table.js", "messages.js", "roles.js", "tree.js",
    "gantt.js", "talk.js", "group.js", "run.js", "step.js", "open.js", "main.js",
)  # fmt: skip
"""Modules of the page; each imports those before it alone."""
VENDORED = {"preact": "vendor/preact.mjs", "preact/hooks": "vendor/hooks.mjs", "htm": "vendor/htm.mjs"}
_CHARTS = "vendor/uPlot.iife.min.js"
_STYLES = ("vendor/uPlot.min.css", "style.css")
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
SERVED = {name: _TYPES[Path(name).suffix] for name in (*MODULES, *VENDORED.values(), _CHARTS, *_STYLES)}
"""Files that the server gives, by name, with their types."""
_REST = "img-src data:; base-uri 'none'; form-action 'none'"
_MAP = json.dumps({"imports": {name: f"./static/{path}" for name, path in VENDORED.items()}})

_IMPORT = re.compile(r'^import\s*(?:\{([^}]*)\}|(\w+))\s*from\s*"([^"]+)";?', re.MULTILINE)
_EXPORTS = re.compile(r"^export\s*\{([^}]*)\};?|export\{([^}]*)\};?", re.MULTILINE)
_DECLARED = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b\s*(\w+))", re.MULTILINE)
_MAP_COMMENT = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


def served_page() -> str:
    """Return the page as the server gives it."""
    styles = "".join(f'<link rel="stylesheet" href="static/{name}">' for name in _STYLES)
    return _html(
        f'{styles}<script type="importmap">{_MAP}</script><script src="static/{_CHARTS}"></script>'
        '<script type="module" src="static/main.js"></script>'
    )


def served_policy() -> str:
    """Return the content security policy of the served page."""
    return (
        f"default-src 'none'; script-src 'self' {_hash(_MAP)}; style-src 'self'; connect-src 'self'; "
        f"{_REST}; frame-ancestors 'none'"
    )


def exported_page(data: Mapping[str, bytes], title: str) -> str:
    """Return the page as one file.

    Args:
        data: Packed data (gzip) by the id of the element that holds it.
        title: Title of the page.
    """
    style = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in _STYLES)
    charts = (STATIC / _CHARTS).read_text(encoding="utf-8")
    program = bundle()
    policy = f"default-src 'none'; script-src {_hash(charts)} {_hash(program)}; style-src {_hash(style)}; {_REST}"
    held = "".join(
        f'<script type="application/gzip" id="{name}">{base64.b64encode(packed).decode()}</script>\n'
        for name, packed in data.items()
    )
    return _html(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>',
        f'{held}<script>{charts}</script><script type="module">{program}</script>',
        title,
    )


def bundle() -> str:
    """Return all modules as one script: each is a function whose exports are an object."""
    parts = ["const modules = {};"]
    for name, path in [*VENDORED.items(), *((f"./{name}", name) for name in MODULES)]:
        text = (STATIC / path).read_text(encoding="utf-8")
        parts.append(f'modules["{name}"] = (() => {{\n{_as_function(text)}\n}})();')
    return "\n".join(parts).replace("</script", "<\\/script")


def _as_function(text: str) -> str:
    """Return a module as the body of a function."""
    exported: list[str] = []

    def imported(found: re.Match[str]) -> str:
        names, default, module = found.groups()
        taken = f"{{{names.replace(' as ', ': ')}}}" if names is not None else f"{{default: {default}}}"
        return f'const {taken} = modules["{module}"];'

    def listed(found: re.Match[str]) -> str:
        for entry in filter(None, (each.strip() for each in (found[1] or found[2]).split(","))):
            own, _, outer = entry.partition(" as ")
            exported.append(f"{outer or own}: {own}")
        return ""

    def declared(found: re.Match[str]) -> str:
        exported.append(found[1])
        return ""

    text = _MAP_COMMENT.sub("", text)
    text = _IMPORT.sub(imported, text)
    text = _EXPORTS.sub(listed, text)
    text = _DECLARED.sub(declared, text)
    if "export default " in text:
        text = text.replace("export default ", "const _default = ", 1)
        exported.append("default: _default")
    return f"{text}\nreturn {{{', '.join(exported)}}};"


def _html(head: str, body: str = "", title: str = "verl-multiturn") -> str:
    safe = one_line(title).replace("&", "&amp;").replace("<", "&lt;")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{safe}</title><link rel="icon" href="data:,">{head}'
        f'</head><body><div id="app"></div>{body}</body></html>\n'
    )


def _hash(text: str) -> str:
    """Return the source of a policy that allows this inline text alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
