"""Hook of MkDocs: the API reference, made from the comments of the .proto files whenever the site is built.

One page a file: its services with their methods, then its messages and enums, all in the file's own
order. What a comment names is linked where it is a message, an enum or a method of the contract.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PACKAGE: Final = ".batond.v1."
SOURCES: Final = ("jobs", "admin", "types")
TITLES: Final = {"jobs": "JobService", "admin": "AdminService", "types": "Messages of both services"}
# Numbers of the fields in descriptor.proto, of which a location's path is made.
_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _METHODS, _VALUES, _ONEOFS = 4, 5, 6, 2, 2, 2, 8
_SYNTAX: Final = 12
_WORD: Final = re.compile(r"\b[A-Za-z][A-Za-z0-9]*(?:[._][A-Za-z0-9]+)*\b")


@dataclass(frozen=True, slots=True)
class Contract:
    """The .proto files as the compiler read them.

    Attributes:
        files: By stem.
        comments: By stem, and by path within the file (see `SourceCodeInfo` in descriptor.proto).
        pages: Stem of the page on which a message, an enum or a method stands.
    """

    files: Mapping[str, FileDescriptorProto]
    comments: Mapping[str, Mapping[tuple[int, ...], str]]
    pages: dict[str, str] = field(default_factory=dict)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference."""
    contract = read(Path(config.docs_dir).parent / "proto")
    files.append(File.generated(config, "reference/index.md", content=index(contract)))
    for stem in SOURCES:
        files.append(File.generated(config, f"reference/{stem}.md", content=page(contract, stem)))
    return files


def read(proto_root: Path) -> Contract:
    """Compiles the contract with its comments.

    Raises:
        PluginError: It does not compile; the compiler's own words went to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "contract.pb"
        arguments = [
            "protoc",
            f"--proto_path={proto_root}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            f"--descriptor_set_out={out}",
            "--include_source_info",
            *(f"batond/v1/{stem}.proto" for stem in SOURCES),
        ]
        if protoc.main(arguments) != 0:
            raise PluginError("the .proto files do not compile")
        found = FileDescriptorSet()
        found.ParseFromString(out.read_bytes())
    files = {Path(one.name).stem: one for one in found.file}
    comments = {
        stem: {
            tuple(place.path): " ".join(place.leading_comments.split())
            or " ".join("".join(place.leading_detached_comments).split())
            for place in one.source_code_info.location
        }
        for stem, one in files.items()
    }
    contract = Contract(files, comments)
    for stem, one in files.items():
        names = [message.name for message in one.message_type] + [enum.name for enum in one.enum_type]
        names += [method.name for service in one.service for method in service.method]
        contract.pages.update(dict.fromkeys(names, stem))
    return contract


def index(contract: Contract) -> str:
    """The first page: what there is, in one table a service."""
    lines = [
        "# API",
        "",
        "The contract `batond.v1` over gRPC, made from the comments of",
        "[proto/batond/v1](../../proto/batond/v1). Within v1 nothing is removed or renumbered. Health is",
        "`grpc.health.v1`, see [operations](../operations.md#health); with `server.reflection` clients can",
        "list all of it.",
    ]
    for stem, one in contract.files.items():
        for place, service in enumerate(one.service):
            comment = _prose(contract, stem, _comment(contract, stem, (_SERVICES, place)), stem_here="index")
            lines += ["", f"## {service.name}", "", comment, "", "| method | does |", "| --- | --- |"]
            for number, method in enumerate(service.method):
                said = _comment(contract, stem, (_SERVICES, place, _METHODS, number))
                said = _prose(contract, stem, said, stem_here="index")
                lines.append(f"| [`{method.name}`]({stem}.md#{method.name}) | {said} |")
    return "\n".join(lines) + "\n"


def page(contract: Contract, stem: str) -> str:
    """All that one file defines."""
    one = contract.files[stem]
    lines = [f"# {TITLES[stem]}", "", _prose(contract, stem, _comment(contract, stem, (_SYNTAX,)))]
    lines += ["", f"Package `batond.v1`, [{stem}.proto](../../proto/batond/v1/{stem}.proto)."]
    for place, service in enumerate(one.service):
        lines += ["", f"## {service.name} {{ #{service.name} }}", ""]
        lines.append(_prose(contract, stem, _comment(contract, stem, (_SERVICES, place))))
        for number, method in enumerate(service.method):
            said = _comment(contract, stem, (_SERVICES, place, _METHODS, number))
            takes, gives = (_link(contract, name.removeprefix(PACKAGE), stem)
                            for name in (method.input_type, method.output_type))  # fmt: skip
            stream = "a stream of " if method.server_streaming else ""
            lines += ["", f"### {method.name} {{ #{method.name} }}", "", _prose(contract, stem, said), ""]
            lines.append(f"Takes {takes}, gives {stream}{gives}.")
    for place, message in enumerate(one.message_type):
        lines += _message(contract, stem, message, (_MESSAGES, place))
    for place, enum in enumerate(one.enum_type):
        lines += _enum(contract, stem, enum, (_ENUMS, place))
    return "\n".join(lines) + "\n"


def _message(contract: Contract, stem: str, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
    yield from ("", f"## {message.name} {{ #{message.name} }}", "")
    yield _prose(contract, stem, _comment(contract, stem, path))
    if not message.field:
        return
    yield from ("", "| field | type | meaning |", "| --- | --- | --- |")
    told: set[int] = set()
    for place, one in enumerate(message.field):
        said = _prose(contract, stem, _comment(contract, stem, (*path, _FIELDS, place)))
        if one.HasField("oneof_index") and not one.proto3_optional:
            name = message.oneof_decl[one.oneof_index].name
            if one.oneof_index not in told:
                told.add(one.oneof_index)
                whole = _comment(contract, stem, (*path, _ONEOFS, one.oneof_index))
                yield f"| one of `{name}` | | {_prose(contract, stem, whole)} |"
            said = f"`{name}`: {said}"
        yield f"| `{one.name}` = {one.number} | {_type(contract, stem, message, one)} | {said} |"


def _enum(contract: Contract, stem: str, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
    yield from ("", f"## {enum.name} {{ #{enum.name} }}", "")
    yield _prose(contract, stem, _comment(contract, stem, path))
    yield from ("", "| value | meaning |", "| --- | --- |")
    for place, value in enumerate(enum.value):
        said = _prose(contract, stem, _comment(contract, stem, (*path, _VALUES, place)))
        yield f"| `{value.name}` = {value.number} | {said} |"


def _type(contract: Contract, stem: str, message: DescriptorProto, one: FieldDescriptorProto) -> str:
    """A field's type in words of the .proto language, linked where it is of the contract."""
    entry = next((inner for inner in message.nested_type if one.type_name.endswith(f".{inner.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_type(contract, stem, message, part) for part in entry.field)
        return f"map of {key} to {value}"
    if one.type_name.startswith(PACKAGE):
        name = _link(contract, one.type_name.removeprefix(PACKAGE), stem)
    elif one.type_name:
        name = f"`{one.type_name.removeprefix('.')}`"
    else:
        name = f"`{FieldDescriptorProto.Type.Name(one.type).removeprefix('TYPE_').lower()}`"
    if one.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if one.proto3_optional else name


def _comment(contract: Contract, stem: str, path: tuple[int, ...]) -> str:
    """What the file says at a place.

    Raises:
        PluginError: Nothing; everything that a client sees has a comment.
    """
    said = contract.comments[stem].get(path, "")
    if not said:
        raise PluginError(f"{stem}.proto has no comment at {path}")
    return said


def _link(contract: Contract, name: str, stem_here: str) -> str:
    page_of = contract.pages[name]
    return f"[{name}]({'' if page_of == stem_here else f'{page_of}.md'}#{name})"


def _prose(contract: Contract, stem: str, comment: str, stem_here: str | None = None) -> str:
    """A comment as Markdown: names of the contract linked, other names as code, no other markup."""

    def word(match: re.Match[str]) -> str:
        name = match[0]
        if name in contract.pages and not name.islower():
            return _link(contract, name, stem_here or stem)
        return f"`{name}`" if "_" in name else name

    parts = re.split(r"(`[^`]+`)", comment)
    parts[::2] = [_WORD.sub(word, re.sub(r"([\\*<|\[\]])", r"\\\1", part)) for part in parts[::2]]
    return "".join(parts)
