"""The documentation's site (docs/site), and the description in a wheel's metadata: no link of either is broken.

    python tests/interop/test_site.py [-k PATTERN]
"""
import ast
import html
import html.parser
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tools/python/reshard"


class Page(html.parser.HTMLParser):
    """The links, pictures and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors.add(attrs.get("id"))
        self.links += [attrs[name] for name in ("href", "src") if attrs.get(name)]


def words(text):
    """Returns the text without Markdown's marks, its words separated by single spaces."""
    return " ".join(text.replace("`", "").split())


@unittest.skipUnless(importlib.util.find_spec("mkdocs"), "mkdocs is not installed")
class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        cls.site = pathlib.Path(cls.directory.name) / "site"
        cls.built = subprocess.run([sys.executable, "-B", "-m", "mkdocs", "build", "--strict", "-q", "-f",
                                    ROOT / "docs/site/mkdocs.yml", "-d", cls.site], capture_output=True, text=True, timeout=120)

    def test_it_builds_and_each_link_has_a_target(self):
        self.assertEqual(self.built.returncode, 0, self.built.stdout + self.built.stderr)
        pages = {p: Page(p.read_text()) for p in self.site.rglob("*.html") if p.name != "404.html"}
        self.assertGreaterEqual(len(pages), len(list((ROOT / "docs").rglob("*.md"))))
        for path, page in pages.items():
            for link in page.links:
                parts = urllib.parse.urlsplit(link)
                if parts.scheme or parts.netloc:
                    continue
                target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                self.assertTrue(target.exists(), f"{path.relative_to(self.site)}: {link}")
                if parts.fragment and target in pages:
                    self.assertIn(urllib.parse.unquote(parts.fragment), pages[target].anchors | {""}, f"{path}: {link}")

    def test_the_reference_has_every_public_name_and_its_docstring(self):
        text = words(html.unescape(re.sub(r"<[^>]*>", "", (self.site / "reference/index.html").read_text())))
        stub = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
        names = {n.name for n in stub if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")}
        self.assertGreater(len(names), 30)
        for name in names:
            self.assertIn(f"reshard.{name}", text)
        for path in PACKAGE.glob("_*.py"):
            for node in ast.parse(path.read_text()).body:
                if getattr(node, "name", None) in names and ast.get_docstring(node):
                    self.assertIn(words(ast.get_docstring(node).split("\n\n")[0]), text, node.name)


class Description(unittest.TestCase):
    def describe(self, url):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "METADATA"
            path.write_text("Metadata-Version: 2.2\nName: reshard-ckpt\n\n" + (ROOT / "README.md").read_text())
            subprocess.run([sys.executable, ROOT / "tools/packages/describe.py", path, *url], check=True)
            return path.read_text()

    def test_links_and_pictures_are_absolute_or_gone(self):
        links = re.compile(r"\]\(([^)]*)\)")
        address = "https://example.org/reshard"
        known, unknown = self.describe([address]), self.describe([])
        self.assertGreater(len(links.findall(known)), 20)
        self.assertEqual([x for x in links.findall(known) if not x.startswith("https://")], [])
        for path in re.findall(re.escape(address) + r"/(?:raw|blob)/main/([^)#\s]*)", known):
            self.assertTrue((ROOT / path).exists(), path)
        self.assertIn(f"\nProject-URL: Source, {address}\n", known)
        self.assertEqual([x for x in links.findall(unknown) if not x.startswith("https://")], [])
        self.assertNotIn("![", unknown)
        self.assertNotIn("Project-URL", unknown)
        self.assertIn("\n## Two commands\n", unknown)


if __name__ == "__main__":
    unittest.main()
