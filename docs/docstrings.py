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
    made = []  # Lines; those of text, which are to be escaped, have a mark: "\0".
    block = ""  # The end of the lines that are shown as they stand.
    in_section = False
    last = ""

    for line in lines:
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())

        if block in ("```", "$$") and stripped == block:
            block = ""
            line = ""
        elif block in ("```", "$$"):
            line = f"    {line}"
        elif stripped == "$$":
            made += ["", ".. math::", ""]
            block = "$$"
            last = ""
            continue
        elif stripped.startswith("```"):
            made += ["", f".. code-block:: {stripped[3:] or 'text'}", ""]
            block = "```"
            last = ""
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

        label = _LABEL.match(line)
        if block == "table":
            # A table goes on to the blank line after its last rule.
            made.append(f"    {line}")
            if not stripped:
                block = ""
        elif block or stripped.startswith((">>>", "...")):
            made.append(line)
        elif what == "module" and not indent and label:
            made += ["", f"**{label[0]}**" + "\0" + line[label.end() :]]
        else:
            made.append("\0" + line)
        last = stripped

    lines[:] = _escaped(made)


def _escaped(made):
    """Escape runs of text, which are marked, as a whole: names may span two lines."""
    escaped = []
    run = []  # Marked lines: their heads, and tails to escape.
    for line in made:
        head, mark, tail = line.partition("\0")
        if mark:
            run.append((head, tail))
            continue
        escaped += _escaped_run(run)
        escaped.append(line)
        run = []
    return escaped + _escaped_run(run)


def _escaped_run(run):
    if not run:
        return []
    tails = _text("\n".join(tail for _, tail in run)).split("\n")
    return [head + tail for (head, _), tail in zip(run, tails, strict=True)]


def _escape(match):
    return match[0] if match[1] else "\\" + match[0]


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
