"""What is in a bundle: as plain data for scripts, and as tables for people (`eagle-export inspect`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle_run.bundle.loading import Bundle

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

Description = dict[str, Any]


def describe(bundle: Bundle) -> Description:
    """The manifest as JSON-ready data, plus `path`, the bytes of each artifact, of all and of links."""
    manifest = bundle.manifest
    data: Description = {"path": str(bundle.path), **manifest.model_dump(mode="json")}
    for record, artifact in zip(data["artifacts"], manifest.artifacts, strict=True):
        record["bytes"] = sum(entry.bytes for entry in artifact.files)
    entries = {entry.path: entry for entry in manifest.files()}.values()
    data["total_bytes"] = sum(entry.bytes for entry in entries)
    data["linked_bytes"] = sum(entry.bytes for entry in entries if entry.origin is not None)
    return data


def render(data: Description) -> RenderableType:
    """The description as rich tables: the bundle, its graphs, what engines came out as, and the tensors.

    Artifacts of one signature share one table of tensors.
    """
    from rich.console import Group

    artifacts = data["artifacts"]
    parts: list[RenderableType] = [_summary(data), "", render_engines(data)]
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for artifact in artifacts:
        alike.setdefault(repr((artifact["graph"], artifact["inputs"], artifact["outputs"])), []).append(
            artifact
        )
    for group in alike.values():
        parts += ["", _tensors(group)]
    return Group(*parts)


def render_engines(data: Description) -> RenderableType:
    """Of the description the graphs, and what compilers made of them."""
    from rich.console import Group

    artifacts = data["artifacts"]
    parts: list[RenderableType] = [_graphs(artifacts)]
    for artifact in artifacts:
        if artifact["engine"] is not None:
            parts += ["", _made(artifact), _profiles(artifact["engine"]["profiles"])]
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
    if data["linked_bytes"]:
        yield "linked", f"{size(data['linked_bytes'])} of them are links to the checkpoint's own files"
    yield "made", f"{data['created']} by eagle-export {data['tool_version']}"
    yield "target", f"{target['name']} ({target['family']}) from {target['source']}"
    yield "", f"{_dims(target)}, vocabulary {target['vocab_size']}"
    if head:
        yield "head", f"{head['algorithm']} ({head['dialect']}) from {head['source']}"
        yield (
            "",
            f"{_dims(head)}, vocabulary {head['draft_vocab_size']}, features {_ids(head['feature_layers'])}",
        )
        if head["settings"]:
            yield "", f"read with {', '.join(head['settings'])}"
        parents = f", parents {_ids(tree['parents'])}" if tree["parents"] else ""
        shape = f"depth {tree['depth']}, top_k {tree['top_k']}, {tree['nodes']} nodes"
        yield "tree", f"{tree['kind']}, {shape} (root included){parents}"
    else:
        yield "head", "none: plain decoding only"
    yield "limits", ", ".join(f"{key} {value}" for key, value in limits.items())
    yield "stops at", _ids(data["stop_token_ids"]) or "nothing"
    yield from _precision_facts(data["quantization"], data["accuracy"])
    build = data["build"]
    yield "build", f"{build['seconds']:.0f} s, peak memory {size(build['peak_memory_bytes'])}"
    yield "", ", ".join(f"{name} {version}" for name, version in build["versions"].items())


def _precision_facts(
    quantization: Mapping[str, Any] | None, accuracy: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    if quantization is not None:
        scales = f"calibrated on {quantization['tokens']} tokens"
        if quantization["source"] != "calibrated":
            scales = f"as the {quantization['source']} checkpoint has them"
        kept = f"; kept in {quantization['base']}: {' '.join(quantization['kept']) or 'none'}"
        yield "quantised", f"{quantization['linears']} linear layers in FP8, scales {scales}{kept}"
    if accuracy is None:
        return
    same, kl = 100 * accuracy["top1_agreement"], accuracy["kl"]
    yield "accuracy", f"{same:.1f}% of the most likely tokens are float32's, KL {kl:.2g} nats"
    own, reference = accuracy["perplexity"], accuracy["reference_perplexity"]
    yield "", f"perplexity {own:.2f} (float32: {reference:.2f})"
    if accuracy["tokens_per_round"] is not None:
        own, reference = accuracy["tokens_per_round"], accuracy["reference_tokens_per_round"]
        yield "", f"{own:.2f} tokens per round (float32: {reference:.2f})"
    runner = {"onnxruntime": "ONNX Runtime", "eager": "PyTorch"}[accuracy["backend"]]
    yield "", f"over {accuracy['tokens']} tokens of {accuracy['prompts']} prompts and answers, in {runner}"


def _dims(part: Mapping[str, Any]) -> str:
    heads = f"{part['heads']}/{part['kv_heads']} heads of {part['head_dim']}"
    return f"{part['layers']} layers, hidden {part['hidden_size']}, {heads}"


def _ids(values: Sequence[int]) -> str:
    return " ".join(str(value) for value in values)


def _graphs(artifacts: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="graphs", title_justify="left")
    for column in ("graph", "backend", "precision", "built with", "GPU", "file", "size"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for artifact in artifacts:
        opset = f", opset {artifact['opset']}" if artifact["opset"] else ""
        table.add_row(
            artifact["graph"],
            artifact["backend"],
            artifact["precision"],
            f"{artifact['library_version']}{opset}",
            _gpus(artifact),
            artifact["file"],
            size(artifact["bytes"]),
        )
    return table


def _gpus(artifact: Mapping[str, Any]) -> str:
    return " ".join(artifact["compute_capabilities"]) or "any"


def _made(artifact: Mapping[str, Any]) -> Text:
    """One line on an engine: what it is for and what the parser took it for."""
    from rich.text import Text

    engine = artifact["engine"]
    line = f"{artifact['graph']} ({artifact['backend']} for {_gpus(artifact)}): "
    line += f"{engine['attention_layers']} attention layers, {engine['cache_updates']} cache updates, "
    line += f"compiled in {engine['seconds']:.0f} s with {size(engine['peak_memory_bytes'])}"
    if engine["hardware_compatibility"] != "none":
        line += f", hardware compatibility {engine['hardware_compatibility']}"
    if engine["version_compatible"]:
        line += ", version compatible"
    return Text(line, style="italic")


def _profiles(profiles: Sequence[Mapping[str, Any]]) -> Table:
    """Sizes and layers of each profile of an engine."""
    from rich.table import Table

    table = Table()
    axes = list(profiles[0]["axes"])
    for column in ("profile", *axes, "kernels", "attention", "GEMMs", "scratch"):
        right = column in ("kernels", "scratch")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for profile in profiles:
        ranges = [_range(profile["axes"][axis]) for axis in axes]
        table.add_row(profile["name"], *ranges, *_layers(profile["layers"]))
    return table


def _range(sizes: Mapping[str, int]) -> str:
    """1, or 1..64 best at 16."""
    if sizes["min"] == sizes["max"]:
        return str(sizes["opt"])
    return f"{sizes['min']}..{sizes['max']} ({sizes['opt']})"


def _layers(layers: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    if layers is None:
        return "not told", "", "", ""
    attention, gemms = (
        ", ".join(f"{count} {name}" for name, count in layers[kind].items()) or "none"
        for kind in ("attention", "gemms")
    )
    return str(layers["kernels"]), attention, gemms, size(layers["scratch_bytes"])


def _tensors(alike: Sequence[Mapping[str, Any]]) -> Table:
    """Inputs and outputs of artifacts that have the same ones."""
    from rich.table import Table

    artifact = alike[0]
    backends = ", ".join(dict.fromkeys(artifact["backend"] for artifact in alike))
    table = Table(title=f"{artifact['graph']} ({backends})", title_justify="left")
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
