"""How is text of a peer shown? Without anything that a terminal would obey, or an eye would not see."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control and format characters, other blanks and surrogates as escapes; equal if it has none."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
