"""What the site adds to docs/: its first page is the README, and the reference lists the names of the Python package."""
import os
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
URL = os.environ.get("RESHARD_URL", "").rstrip("/")
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
PLACES = {"index.md": "", "changelog.md": ""}  # pages of files at the root, by the directory that their links start from


def move_links(text, start, page):
    """Makes relative links of a page, written in directory `start` of the repository, those of a page in docs/.

    A link to a file outside docs/ leads to the repository, if its URL is known, and is text otherwise.
    """

    def moved(match):
        path, _, anchor = match[3].partition("#")
        target = posixpath.normpath(posixpath.join(start, path))
        if target == "CHANGELOG.md":
            target = "docs/changelog.md"
        if target.startswith("docs/"):
            there = posixpath.relpath(target[len("docs/") :], posixpath.dirname(page) or ".")
            return f"{match[1]}[{match[2]}]({there}{'#' + anchor if anchor else ''})"
        return f"[{match[2]}]({URL}/blob/main/{target})" if URL else match[2]

    return LINK.sub(moved, text)


def on_files(files, config):
    """Adds the pages that are made of files outside docs/."""
    texts = {"index.md": (ROOT / "README.md").read_text(), "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
             "reference.md": reference.reference(ROOT / "tools/python/reshard")}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, **_):
    """Moves the links of every page."""
    path = page.file.src_uri
    start = PLACES.get(path, posixpath.join("docs", posixpath.dirname(path)))
    return move_links(markdown, start, path)
