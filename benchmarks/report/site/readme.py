"""A study's README as HTML: its own markup is shown as text, and its links lead to what a site holds."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

README = "README.md"
Target = Callable[[str], str | None]  # an address as the README has it, to one of the site; None if there is none


class Readme:
    """A parsed README: its title, its first sentence, and its body."""

    def __init__(self, text: str) -> None:
        tokens = _MARKDOWN.parse(text)
        headed = bool(tokens) and tokens[0].tag == "h1"
        self.title = _strip_markup(tokens[1]) if headed else ""
        self.heading = _mark_code(tokens[1]) if headed else Markup()
        self._tokens = tokens[3:] if headed else tokens
        first = next((token for token in self._tokens if token.type == "inline"), None)
        self.opening = " ".join(_strip_markup(first).split()) if first else ""

    @classmethod
    def read(cls, folder: Path) -> "Readme":
        """Read the README of a folder; an empty one where there is none.

        Args:
            folder: Folder of a study.
        """
        path = folder / README
        return cls(path.read_text(encoding="utf-8") if path.is_file() else "")

    @property
    def sentence(self) -> str:
        """Return its first sentence."""
        return re.split(r"(?<=[.?!])\s", self.opening, maxsplit=1)[0]

    def render_html(self, link: Target, image: Target, methods: Mapping[str, str]) -> Markup:
        """Render everything below the title.

        Args:
            link: Maps the address of a link to that on the site; None drops the link.
            image: Maps the address of a picture to that on the site; None shows its text instead.
            methods: Addresses of pages by method; names of methods in code become links to them.
        """
        for token in self._tokens:
            if token.type == "inline":
                token.children = list(_link_tokens(token.children or (), link, image, methods))
            elif token.attrGet("style"):  # how columns are aligned, which a policy against styles forbids
                token.attrs = {"class": str(token.attrs["style"]).rpartition(":")[2]}
        return Markup(_MARKDOWN.renderer.render(self._tokens, _MARKDOWN.options, {}))  # noqa: S704 (text was escaped)


def _link_tokens(tokens: Sequence[Token], link: Target, image: Target, methods: Mapping[str, str]) -> Iterator[Token]:
    """Yield the tokens of a line, with addresses of the site in place of the README's own."""
    opened: list[bool] = []  # of the links around a token, whether they lead anywhere
    for token in tokens:
        if token.type == "link_open":
            target = link(str(token.attrs["href"]))
            opened.append(target is not None)
            token.attrs = {"href": target or ""}
            if target is not None:
                yield token
        elif token.type == "link_close":
            if opened.pop():
                yield token
        elif token.type == "image":
            source = image(str(token.attrs["src"]))
            token.attrs = {"src": source or "", "alt": "", "loading": "lazy"}
            yield token if source else Token("text", "", 0, content=f"[{token.content}]")
        elif token.type == "code_inline" and token.content in methods and not opened:
            yield Token("link_open", "a", 1, attrs={"href": methods[token.content]})
            yield token
            yield Token("link_close", "a", -1)
        else:
            yield token


def _strip_markup(token: Token) -> str:
    """Return the text of a line without markup."""
    return "".join(child.content or " " for child in token.children or () if not child.nesting)


def _mark_code(token: Token) -> Markup:
    """Return the text of a line without markup, except that code is marked."""
    texts = [child for child in token.children or () if not child.nesting]
    return Markup().join(
        Markup("<code>{}</code>").format(child.content) if child.type == "code_inline" else child.content or " "
        for child in texts
    )


def _open_table(_: RendererHTML, tokens: Sequence[Token], place: int, *__: object) -> str:
    number = sum(token.type == "table_open" for token in tokens[: place + 1])
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table {number} of the report"><table>\n'


def _close_table(*_: object) -> str:
    return "</table></div>\n"


def _open_code(_: RendererHTML, tokens: Sequence[Token], place: int, *__: object) -> str:
    return f'<pre tabindex="0"><code>{Markup.escape(tokens[place].content)}</code></pre>\n'


_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_MARKDOWN.add_render_rule("table_open", _open_table)
_MARKDOWN.add_render_rule("table_close", _close_table)
_MARKDOWN.add_render_rule("fence", _open_code)
_MARKDOWN.add_render_rule("code_block", _open_code)
