"""Makes reStructuredText of docstrings: equations, paper numbers, named sections.

Docstrings are plain text in Google style, with LaTeX as in Markdown: `$x$` in a line,
and lines between two lines of `$$`. What is indented after a blank line is a table, a
command or plain equations, and is shown as it stands.
"""

import re

_LABEL = re.compile(
    r"(?:Sources?|Derived here|Differs from the paper|Defaults?|Measured here)"
    r"[^:]{0,40}:"
)
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Examples?|Note):\s*$")


def process(app, what, name, obj, options, lines):
    """Change the lines of a docstring in place, as autodoc's event asks."""
    made = []  # Parts: text to escape in lists, lines as they stand in strings.
    block = ""  # What ends the lines that are shown as they stand.
    in_section, last = False, ""
    for line in lines:
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if block in ("```", "$$") and stripped == block:
            block, line = "", ""
        elif block in ("```", "$$"):
            line = f"    {line}"
        elif stripped == "$$":
            made += ["", ".. math::", ""]
            block, last = "$$", ""
            continue
        elif stripped.startswith("```"):
            made += ["", f".. code-block:: {stripped[3:] or 'text'}", ""]
            block, last = "```", ""
            continue
        elif block == "dedent" and stripped and not indent:
            block = ""
        elif block == "blank" and not stripped:
            block = ""
        if not block:
            if _SECTION.match(line):
                in_section = True
            elif stripped and not indent:
                in_section = False
            if re.match(r"=+ +=+", stripped) and not last:
                made += ["::", ""]
                block = "table"
            elif indent >= 4 and not last and made and not in_section:
                if not stripped.startswith((">>>", "- ")):
                    made += ["::", ""]
                    block = "dedent"
        if block == "table":
            # A table goes on to the blank line after its last rule.
            made.append(f"    {line}")
            if not stripped:
                block = ""
        elif block or stripped.startswith((">>>", "...")):
            made.append(line)
        elif what == "module" and not indent and (found := _LABEL.match(line)):
            made += ["", f"**{found[0]}**" + "\0" + line[found.end() :]]
        else:
            made.append("\0" + line)
        last = stripped
    lines[:] = _escaped(made)


def _escaped(made):
    """Escape runs of text, which are marked, as a whole: names may span two lines."""
    out, run = [], []
    for line in [*made, None]:
        head, mark, tail = (line or "").partition("\0")
        if line is not None and mark:
            run.append((head, tail))
            continue
        if run:
            escaped = _text("\n".join(tail for _, tail in run)).split("\n")
            out += [h + t for (h, _), t in zip(run, escaped, strict=True)]
            run = []
        if line is not None:
            out.append(line)
    return out


def _escape(found):
    return found[0] if found[1] else "\\" + found[0]


def _text(text):
    """Escape what would be markup outside of `names`, and write `$x$` as math."""
    parts = re.split(r"(``[^`]*``|`[^`]*`|\$[^$\s](?:[^$]*[^$\s])?\$)", text)
    for i, part in enumerate(parts):
        if i % 2:
            is_plural = re.match(r"\w", (parts[i + 1 :] or [""])[0])
            if part[0] == "$":
                part = f":math:`{part[1:-1]}`"
            parts[i] = part + ("\\ " if is_plural else "")
            continue
        # Emphasis stays: *word* and **some words**. A letter with a dot is no list.
        part = re.sub(
            r"((?<![\w*])\*\w+\*(?![\w*])|\*\*[^*\s][^*]*\*\*)|[*|]", _escape, part
        )
        part = re.sub(r"(?<!\S)--[a-z]\w*(?:=[\w,.:+/-]*\w)?", r"``\g<0>``", part)
        part = re.sub(r"(^|: )([A-Za-z])\.(?=\s|$)", r"\1\2\\.", part, flags=re.M)
        part = re.sub(r"(?<=\w)_(?=[\s,.;:)]|$)", r"\\_", part)
        part = re.sub(r"(?<=\w)@(?=\w)", r"\\@", part)  # Is no address of an e-mail.
        parts[i] = re.sub(
            r"arXiv (\d{4}\.\d{4,5})",
            r"`arXiv \1 <https://arxiv.org/abs/\1>`__",
            part,
        )
    return "".join(parts)
