#!/usr/bin/env python3
"""Checks the form of files, comments and Markdown: packaging/prose/check.py, at the top of the checkout.

- No line of prose is wider than 100 columns. --wrap wraps those that are, and changes no word.
- No sentence begins with Who, Whoever, Of what, and no comment with "The same." or "As `x`": name who
  acts, and let each comment stand alone.
- No file has more than 700 lines.
- Comments of Rust have no examples: nothing runs them.

Names of files limit the check to these. Tables, code, headings and words that are wider than a line stay
as they are."""
import argparse
import pathlib
import re
import subprocess
import sys

WIDTH = 100
LINES = 700
# The beginning of a line of comment, by the end of the file's name.
MARKERS = {
    ".rs": r"\s*//[/!]?(?= |$)",
    ".c": r"\s*(?://|\*)(?= |$)",
    ".h": r"\s*(?://|\*)(?= |$)",
    ".py": r"\s*#(?= |$)",
    ".sh": r"\s*#(?= |$)",
    ".toml": r"\s*#(?= |$)",
    ".yml": r"\s*#(?= |$)",
    "Makefile": r"#(?= |$)",
}
# The files there are, also new ones.
TRACKED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
# Programs write these.
GENERATED = {"bench/paper/RESULTS.md", "docs/user/metrics.md", "docs/user/options.md"}
FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"(\s*(?:[-*+]|\d+[.)])\s+)\S")
# Tables, headings, quotations, tags, targets of links.
STRUCTURE = re.compile(r"\s*(\||#|>|<|\[[^\]]*\]: )")
# What would begin such a thing, or an item, at the beginning of a line.
BEGINS = re.compile(r"[-*+>|]|#+|\d+[.)]|[|<>#].*|\[.*\]:")
# Code is not broken, if it is shorter than half a line.
WORD = re.compile(r"(?:`[^`]{1,48}`|\S)+")
FORBIDDEN = re.compile(r"(?:^|(?<=[.:;] ))(?:Who|Whoever|Of what)\b|^The same(?=[.,;:]| (?:as|by|for|in|of|to|through|twice|when|where|while|with)\b)|^As \[?`")


def paragraphs(lines):
    """Yields pairs: whether the lines are prose, and the lines of one paragraph.

    >>> list(paragraphs(["# A", "b", "c", "", "- d", "  e", "- f", "", "    g", "```", "h", "```"]))
    ... # doctest: +NORMALIZE_WHITESPACE
    [(False, ['# A']), (True, ['b', 'c']), (False, ['']), (True, ['- d', '  e']), (True, ['- f']),
     (False, ['']), (True, ['    g']), (False, ['```']), (False, ['h']), (False, ['```'])]
    >>> list(paragraphs(["a", "", "    code", "| x |"]))
    [(True, ['a']), (False, ['']), (False, ['    code']), (False, ['| x |'])]
    """
    part, is_fenced, is_in_item = [], False, False
    for line in lines:
        is_fence, is_item = FENCE.match(line), ITEM.match(line)
        is_code = line.startswith("    ") and not part and not is_in_item
        is_prose = line.strip() and not (is_fenced or is_fence or is_code or STRUCTURE.match(line))
        if part and (is_item or not is_prose):
            yield True, part
            part = []
        if not is_prose:
            yield False, [line]
            is_fenced ^= is_fence is not None
            continue
        if not part:
            is_in_item = is_item is not None or is_in_item and line.startswith(" ")
        part = [*part, line]
    if part:
        yield True, part


def wrap(part, room):
    """Returns the words of a paragraph in lines of at most that width. Code within it is one word.

    >>> wrap(["- one two", "  three"], 11)
    ['- one two', '  three']
    >>> wrap(["one two - three"], 8)
    ['one two -', 'three']
    >>> wrap(["run `make", "check` now"], 10)
    ['run', '`make check`', 'now']
    """
    item = ITEM.match(part[0])
    indents = [re.match(r"\s*", line)[0] for line in part]
    rest = " " * len(item[1]) if item else indents[min(1, len(part) - 1)]
    lines, line = [], indents[0]
    for nth, word in enumerate(WORD.findall(" ".join(line.strip() for line in part))):
        is_first = nth == 0
        if not is_first and len(line) + 1 + len(word) > room and not BEGINS.fullmatch(word):
            lines.append(line)
            line, is_first = rest, True
        line += word if is_first else " " + word
    return [*lines, line]


def runs(lines, marker):
    """Yields the lines of a program in runs: the beginning of a comment, or None, and the rest of each.

    >>> list(runs(["a", "// b", "//", "c"], MARKERS[".rs"]))
    [(None, ['a']), ('//', [' b', '']), (None, ['c'])]
    """
    run, before = [], None
    for line in lines:
        found = re.match(marker, line)
        beginning = found[0] if found else None
        if run and beginning != before:
            yield before, run
            run = []
        before = beginning
        run.append(line[len(beginning) :] if found else line)
    if run:
        yield before, run


def texts(path, lines):
    """Yields the runs of a file: the beginning of each line, or None for a program's own, and the rest."""
    if path.suffix == ".md":
        yield "", lines
    else:
        for beginning, run in runs(lines, MARKERS.get(path.suffix) or MARKERS[path.name]):
            is_comment = beginning is not None
            yield beginning and beginning + " ", [text.removeprefix(" ") if is_comment else text for text in run]


def wrapped(path, lines):
    """Returns the lines of a file, with those wrapped that are too wide."""
    new = []
    for beginning, run in texts(path, lines):
        room = WIDTH - len((beginning or "").expandtabs(4))
        for is_prose, part in paragraphs(run) if beginning is not None else [(False, run)]:
            is_wide = is_prose and any(len(line.expandtabs(4)) > room for line in part)
            part = wrap(part, room) if is_wide else part
            new += [(beginning + line).rstrip() if beginning else line for line in part]
    return new


def forbidden(path, lines):
    """Returns the sentences of a file that begin as they must not.

    >>> forbidden(pathlib.Path("a.md"), ["Who reads it. Whoever", "is here: nobody."])
    ['Who reads it', 'Whoever is here: nobody']
    >>> forbidden(pathlib.Path("a.md"), ["- Who reads it"])
    ['Who reads it']
    """
    found = []
    for beginning, run in texts(path, lines):
        for is_prose, part in paragraphs(run) if beginning is not None else []:
            text = " ".join(line.strip() for line in part) if is_prose else ""
            text = re.sub(r"^(?:[-*+]|\d+[.)])\s+", "", text)
            found += [text[hit.start() :].split(". ")[0].rstrip(".") for hit in FORBIDDEN.finditer(text)]
    return found


def untested(path, lines):
    """Returns the numbers of the lines at which a comment of Rust begins an example.

    >>> untested(pathlib.Path("a.rs"), ["/// ```text", "/// A", "/// ```", "/// ```", "/// b();", "/// ```"])
    [4]
    """
    fences = [(at, line) for at, line in enumerate(lines, 1) if re.match(r"\s*//[/!] ```", line)]
    return [at for at, line in fences[::2] if path.suffix == ".rs" and not line.endswith("```text")]


def words(path, lines):
    """Returns the words of a file, without the beginnings of its comments."""
    return [word for _, run in texts(path, lines) for text in run for word in text.split()]


def files(names):
    """Yields the files that there are, or that are named."""
    for name in names or subprocess.check_output(TRACKED, text=True).splitlines():
        path = pathlib.Path(name)
        is_known = path.suffix == ".md" or path.suffix in MARKERS or path.name in MARKERS
        if is_known and name not in GENERATED and path.is_file() and not path.is_symlink():
            yield path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wrap", action="store_true", help="wrap lines that are too wide")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    wide, wrong = 0, 0
    for path in files(options.files):
        lines = path.read_text().split("\n")
        if len(lines) > LINES + 1:
            wrong += 1
            print(f"{path}: {len(lines) - 1} lines: split it, {LINES} are enough for one file", file=sys.stderr)
        for sentence in forbidden(path, lines):
            wrong += 1
            print(f"{path}: name who acts: {sentence}", file=sys.stderr)
        for at in untested(path, lines):
            wrong += 1
            print(f"{path}:{at}: nothing runs examples in comments: write a test, or begin with ```text", file=sys.stderr)
        new = wrapped(path, lines)
        if new == lines:
            continue
        assert words(path, new) == words(path, lines), f"{path}: its words would change"
        if options.wrap:
            path.write_text("\n".join(new))
            continue
        wide += 1
        at = next(at for at, (old, made) in enumerate(zip(lines, new), 1) if old != made)
        print(f"{path}:{at}: prose is wider than {WIDTH} columns", file=sys.stderr)
    if wide:
        print(f"packaging/prose/check.py --wrap wraps the {wide} files", file=sys.stderr)
    sys.exit(1 if wide or wrong else 0)


if __name__ == "__main__":
    main()
