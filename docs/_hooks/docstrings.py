"""Docstrings for the API reference: what is plain text in the source becomes Markdown.

- The arguments of an optimizer are declared outside of its class; they are those that it has when it is imported.
- Roles such as ``:meth:`step` `` become links to what they name, where the reference describes it.
- Examples (``>>>``) become blocks of code. Indented equations are that already; marks inside of them are taken out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?(?P<name>[^`]+)`")
EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*\n?(?:(?P=indent)\S.*\n?|(?P=indent) .*\n?)*", re.MULTILINE)
ATTRIBUTES = re.compile(r"^Attributes:\n(?P<entries>(?:    .*\n?)+)", re.MULTILINE)
SECTION = re.compile(r"(Args|Notes|Raises|Returns|Yields):")


class PlainDocstrings(griffe.Extension):
    """Complete optimizers, and rewrite the docstring of every object."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let a name that is both a module and a function of it mean the function, as it does when imported."""
        for name, member in list(pkg.members.items()):
            if member.is_alias and name in getattr(member.final_target, "members", {}):
                pkg.set_member(name, griffe.Alias(name, f"{member.final_target.path}.{name}"))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Once the whole package is known."""
        if obj.is_class and any("with_hyperparameters" in str(decorator.value) for decorator in obj.decorators):
            _complete_optimizer(obj)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, obj)


def _complete_optimizer(cls: griffe.Class) -> None:
    """The signature and the documentation that the class has when it is imported."""
    running = griffe.dynamic_import(cls.path)
    cls.docstring.value = inspect.cleandoc(running.__doc__)
    cls.members["__init__"].parameters = griffe.Parameters(*_parameters(inspect.signature(running.__init__)))


def _parameters(signature: inspect.Signature) -> Iterator[griffe.Parameter]:
    """The parameters of a signature, with the last parts of their types' names."""
    for parameter in signature.parameters.values():
        typed = parameter.annotation is not inspect.Parameter.empty
        annotation = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(parameter.annotation))
        yield griffe.Parameter(
            parameter.name,
            annotation=annotation.strip("'") if typed else None,
            kind=griffe.ParameterKind[parameter.kind.name.lower()],
            default=None if parameter.default is inspect.Parameter.empty else _written(parameter.default),
        )


def _written(default: object) -> str:
    """A default as it would be written in a call."""
    return 'float("inf")' if default == float("inf") else repr(default)


def as_markdown(text: str, owner: griffe.Object) -> str:
    """A docstring of this library as Markdown."""
    lines, literal, section, after_blank = [], False, False, True
    for line in _in_fences(ATTRIBUTES.sub(_listed, text)).split("\n"):
        if line.startswith("    "):
            literal = literal or (after_blank and not section)
        elif line:
            literal, section = False, bool(SECTION.fullmatch(line))
        lines.append(_plain(line) if literal else _linked(line, owner))
        after_blank = not line
    return "\n".join(lines)


def _listed(match: re.Match[str]) -> str:
    """Attributes as a list: the parser of the reference gives those without a type the type of another one."""
    entries = re.findall(r"^    (\w[^:]*): ((?:.*\n?)(?:^     .*\n?)*)", match["entries"], flags=re.MULTILINE)
    rows = [f"- `{names.replace(', ', '`, `')}`: {' '.join(words.split())}" for names, words in entries]
    return "\n".join(["**Attributes:**", "", *rows, ""])


def _in_fences(text: str) -> str:
    """Examples as blocks of code."""

    def fenced(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    return EXAMPLE.sub(fenced, text)


def _plain(line: str) -> str:
    """A line of a preformatted block, in which marks would be seen as they are written."""
    return ROLE.sub(r"\g<name>", line).replace("``", "")


def _linked(text: str, owner: griffe.Object) -> str:
    """Text whose roles are links, if the reference describes what they name."""

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        return f'<autoref identifier="{_path(name, owner)}" optional><code>{name}</code></autoref>'

    return ROLE.sub(link, text)


def _path(name: str, owner: griffe.Object) -> str:
    """The dotted path that a name means where it is written: in a class, one of its bases, or a module."""
    if name.startswith("vprop."):
        return name
    first, *rest = name.split(".")
    scope: griffe.Object | None = owner
    while scope is not None:
        known = scope.all_members if scope.is_class else scope.members
        if first in known:
            return ".".join([known[first].canonical_path, *rest])
        scope = scope.parent
    return name
