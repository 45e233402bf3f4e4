"""The table of docs/benchmarks.md on big targets, from what benchmarks/export_scale.py measured."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import markdown

_SHAPES = {"tiny": "tiny", "1b": "Llama-3.2-1B", "8b": "Llama-3.1-8B", "70b": "Llama-3.3-70B"}
_WAYS = {
    "linked": "`eagle-export build --link-weights`",
    "written": "`eagle-export build`",
    "torch": "Transformers and `torch.onnx.export`, target alone",
}


def scale_table(results: dict[str, Any]) -> str:
    """A row for each shape and way of exporting it."""
    rows = []
    for shape, found in results["shapes"].items():
        label = f"{_SHAPES[shape]}, {found['target_bytes'] / 1e9:.1f} GB"
        rows += [[label, text, *_row(found[way])] for way, text in _WAYS.items() if way in found]
    head = ["shape, bfloat16", "exported by", "seconds", "peak memory, GB", "written, GB"]
    env = results["environment"]
    machine = f"{env['cores']} cores of {env['cpu']}, {env['memory_bytes'] / 1e9:.0f} GB of memory"
    return markdown(head, rows) + f"\n{machine}, torch {env['torch']}.\n"


def _row(found: dict[str, Any]) -> list[str]:
    if "refused" in found:
        return [f"does not fit: {found['refused']}", "–", "–"]
    peak, written = found["peak_memory_bytes"] / 1e9, found["written_bytes"] / 1e9
    return [f"{found['seconds']:.0f}", f"{peak:.1f}", f"{written:.2f}"]
