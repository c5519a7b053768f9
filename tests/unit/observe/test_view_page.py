"""The page's files: vendored ones are whole, ours fit together, and the policy allows them alone."""

import base64
import hashlib
import re

from verl_multiturn.observe.view.page import MODULES, SERVED, STATIC, bundle, exported_page, served_page, served_policy

VENDOR = STATIC / "vendor"


def test_vendored_files_are_those_of_their_projects() -> None:
    told = dict(reversed(line.split("  ")) for line in (VENDOR / "checksums.txt").read_text().splitlines())
    assert told == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name != "checksums.txt"
    }
    assert {"preact.LICENSE", "htm.LICENSE", "uPlot.LICENSE"} <= told.keys()


def test_each_module_imports_those_before_it() -> None:
    for at, name in enumerate(MODULES):
        imported = re.findall(
            r'^import .*? from "\./([\w.]+)";$', (STATIC / name).read_text(), re.MULTILINE | re.DOTALL
        )
        assert set(imported) <= set(MODULES[:at]), name


def test_all_files_of_ours_are_served() -> None:
    assert {path.name for path in STATIC.glob("*.*")} == {name for name in SERVED if "/" not in name}


def test_no_view_sets_html_or_evaluates_text() -> None:
    for name in MODULES:
        text = (STATIC / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://", text
        )


def test_the_bundle_has_no_import_left() -> None:
    text = bundle()
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)
    assert "</script" not in text


def test_the_served_page_has_no_script_of_its_own_but_the_map() -> None:
    (inline,) = re.findall(r"<script(?![^>]*src=)[^>]*>(.*?)</script>", served_page(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    policy = served_policy()
    assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_the_exported_page_allows_what_it_holds() -> None:
    page = exported_page({"data-base": b"packed"}, "<b>&")
    policy = re.search(r'content="(default-src[^"]*)"', page)
    assert policy is not None
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    for text in (*scripts, style[1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "connect-src" not in policy[1]
    assert "<title>&lt;b>&amp;</title>" in page
    assert '<script type="application/gzip" id="data-base">cGFja2Vk</script>' in page
