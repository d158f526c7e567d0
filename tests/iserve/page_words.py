"""Words of an HTML page: its sentences, without tables and charts."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["page_words"]

_TOLD = {"h1", "h2", "h3", "p", "li", "summary", "figcaption"}


def page_words(page: str) -> list[str]:
    """Return the text of each heading, paragraph, list item and caption of ``page``, in their order."""
    reader = _Reader()
    reader.feed(page)
    return [line for line in (" ".join(text.split()) for text in reader.texts) if line]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _TOLD:
            self._inside.append(tag)
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            self._inside.remove(tag)

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data
