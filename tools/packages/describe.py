"""Makes the description in a wheel's METADATA stand alone: a package index shows it outside the repository.

    describe.py METADATA [URL]

With the repository's URL, relative links and pictures become absolute and the Project-URL fields are added. Without it,
pictures are left out and relative links become text.
"""
import re
import sys

LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
URLS = {"Homepage": "", "Documentation": "/tree/main/docs", "Source": "", "Issues": "/issues",
        "Changelog": "/blob/main/CHANGELOG.md"}


def describe(metadata, url):
    """Returns the text of METADATA with a description that needs no other file."""
    head, separator, text = metadata.partition("\n\n")
    if url:
        fields = [f"Project-URL: {name}, {url}{path}" for name, path in URLS.items()]
        head = "\n".join([head, *fields])
        text = LINK.sub(lambda m: f"{m[1]}[{m[2]}]({url}/{'raw' if m[1] else 'blob'}/main/{m[3]})", text)
    else:
        # A table of pictures goes with its header, the line above its rule.
        text = re.sub(r"^\|.*\n\|[ :|-]+\n(?=(\|.*!\[.*\n)+)(\|.*\n)+\n?", "", text, flags=re.M)
        text = LINK.sub(lambda m: "" if m[1] else m[2], text)
    return head + separator + text


def main():
    path, url = sys.argv[1], sys.argv[2].rstrip("/") if len(sys.argv) > 2 else ""
    if url and not url.startswith("https://"):
        sys.exit(f"describe.py: {url} is not an https address")
    with open(path, encoding="utf-8") as f:
        metadata = f.read()
    with open(path, "w", encoding="utf-8") as f:
        f.write(describe(metadata, url))


if __name__ == "__main__":
    main()
