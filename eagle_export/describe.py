"""What is in a bundle: as plain data for scripts, and as tables for people (`eagle-export inspect`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle_run.bundle import Bundle

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Description = dict[str, Any]


def describe(bundle: Bundle) -> Description:
    """The manifest as JSON-ready data, plus `path`, the bytes of each artifact and of the whole bundle."""
    manifest = bundle.manifest
    data: Description = {"path": str(bundle.path), **manifest.model_dump(mode="json")}
    for record, artifact in zip(data["artifacts"], manifest.artifacts, strict=True):
        record["bytes"] = sum(entry.bytes for entry in artifact.files)
    data["total_bytes"] = sum(
        entry.bytes for entry in {entry.path: entry for entry in manifest.files()}.values()
    )
    return data


def render(data: Description) -> RenderableType:
    """The description as rich tables: the bundle, its graphs, and the tensors of each graph."""
    from rich.console import Group

    parts: list[RenderableType] = [_summary(data), "", _graphs(data["artifacts"])]
    for artifact in data["artifacts"]:
        parts += ["", _tensors(artifact)]
    return Group(*parts)


def _summary(data: Description) -> Table:
    from rich.table import Table

    table = Table(title=data["path"], show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in _facts(data):
        table.add_row(key, value)
    return table


def _facts(data: Description) -> Iterator[tuple[str, str]]:
    target, head, tree, limits = data["target"], data["head"], data["tree"], data["limits"]
    yield "bundle", f"{data['name']}, schema {data['schema_version']}, {size(data['total_bytes'])}"
    yield "made", f"{data['created']} by eagle-export {data['tool_version']}"
    yield "target", f"{target['name']} ({target['family']}) from {target['source']}"
    yield "", f"{_dims(target)}, vocabulary {target['vocab_size']}"
    if head:
        yield "head", f"{head['algorithm']} ({head['dialect']}) from {head['source']}"
        yield (
            "",
            f"{_dims(head)}, vocabulary {head['draft_vocab_size']}, features {_ids(head['feature_layers'])}",
        )
        parents = f", parents {_ids(tree['parents'])}" if tree["parents"] else ""
        shape = f"depth {tree['depth']}, top_k {tree['top_k']}, {tree['nodes']} nodes"
        yield "tree", f"{tree['kind']}, {shape} (root included){parents}"
    else:
        yield "head", "none: plain decoding only"
    yield "limits", ", ".join(f"{key} {value}" for key, value in limits.items())
    yield "stops at", _ids(data["stop_token_ids"]) or "nothing"
    build = data["build"]
    yield "build", f"{build['seconds']:.0f} s, peak memory {size(build['peak_memory_bytes'])}"
    yield "", ", ".join(f"{name} {version}" for name, version in build["versions"].items())


def _dims(part: Mapping[str, Any]) -> str:
    heads = f"{part['heads']}/{part['kv_heads']} heads of {part['head_dim']}"
    return f"{part['layers']} layers, hidden {part['hidden_size']}, {heads}"


def _ids(values: Sequence[int]) -> str:
    return " ".join(str(value) for value in values)


def _graphs(artifacts: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="graphs", title_justify="left")
    for column in ("graph", "backend", "precision", "built with", "GPU", "file", "size"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for artifact in artifacts:
        opset = f", opset {artifact['opset']}" if artifact["opset"] else ""
        table.add_row(
            artifact["graph"],
            artifact["backend"],
            artifact["precision"],
            f"{artifact['library_version']}{opset}",
            " ".join(artifact["compute_capabilities"]) or "any",
            artifact["file"],
            size(artifact["bytes"]),
        )
    return table


def _tensors(artifact: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"{artifact['graph']} ({artifact['backend']})", title_justify="left")
    for column in ("", "name", "dtype", "shape"):
        table.add_column(column)
    for side in ("inputs", "outputs"):
        for position, row in enumerate(_folded(artifact[side])):
            table.add_row(side if position == 0 else "", *row)
        table.add_section()
    return table


def _folded(tensors: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Rows of name, dtype, shape; the per-layer caches, all alike, as one row per kind."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for tensor in tensors:
        stem = re.sub(r"\.\d+$", "", tensor["name"])
        shape = "[" + ", ".join(str(size) for size in tensor["shape"]) + "]"
        rows.setdefault((stem, tensor["dtype"], shape), []).append(tensor["name"])
    for (stem, dtype, shape), names in rows.items():
        numbers = [name.removeprefix(f"{stem}.") for name in names]
        name = names[0] if len(names) == 1 else f"{stem}.{{{numbers[0]}..{numbers[-1]}}}"
        yield name, dtype, shape


def size(count: int) -> str:
    """Bytes for people: 1.5 GB, 270 MB, 12 kB (powers of 1000)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            scaled = count / factor
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"
    return f"{count} bytes"
