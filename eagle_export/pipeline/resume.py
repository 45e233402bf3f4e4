"""What decides the contents of a bundle, and its finished graphs in the journal of an unfinished folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

import eagle_export
import eagle_run
from eagle_run.bundle.hashing import file_sha256
from eagle_run.bundle.tensors import GraphSpec

if TYPE_CHECKING:
    from eagle_export.pipeline.partial import Partial
    from eagle_export.pipeline.plan import Plan
    from eagle_export.pipeline.quantization import Quantization


def tool_identity() -> dict[str, str]:
    """This tool and the libraries that write graphs. Code counts as it is: a checkout has no version."""
    from eagle_export.pipeline.facts import library_versions

    digest = hashlib.sha256()
    for package in (eagle_export, eagle_run):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    tool = {"eagle-export": importlib.metadata.version("eagle-export"), "code": digest.hexdigest()}
    return {**tool, **library_versions()}


def build_identity(plan: Plan, command: str) -> dict[str, Any]:
    """Everything that decides the graphs of a build. What else it makes depends on more (`Step.key`)."""
    fp8 = asdict(plan.fp8)
    calibrates = plan.precision == "fp8" and plan.fp8.scales is None
    for name in ("scales", "prompts"):  # their contents count, not where they are
        if (path := fp8[name]) is not None and path.is_file():
            fp8[name] = file_sha256(path)
    return {
        "command": command,
        "target": plan.target.sha256,
        "head": None if plan.head is None else plan.head.sha256,
        "reading of the head": None if plan.loaded is None else asdict(plan.loaded.spec),
        "limits": plan.limits.model_dump(),
        "precision": plan.precision,
        "links": plan.link_weights,
        "type": plan.dtype,
        "fp8": fp8,
        "calibration's tree": None if plan.tree is None or not calibrates else plan.tree.model_dump(),
        "versions": tool_identity(),
    }


def recall_graph(journal: Partial, graph: str, quantization: Quantization | None) -> GraphSpec | None:
    """The signature of a graph that an earlier run exported, or None; `quantization` hears what it did."""
    from eagle_export.quantize.fp8.rewrite import Quantized

    recalled = journal.recall(f"export {graph}")
    if recalled is None:
        return None
    if quantization is not None and recalled.facts["quantized"] is not None:
        quantization.done[graph] = TypeAdapter(Quantized).validate_python(recalled.facts["quantized"])
    return TypeAdapter(GraphSpec).validate_json(json.dumps(recalled.facts["spec"]))


def record_graph(
    journal: Partial, spec: GraphSpec, files: Sequence[Path], quantization: Quantization | None
) -> None:
    """Notes that a graph is finished, in these files."""
    done = None if quantization is None else quantization.done.get(spec.name)
    journal.record(
        f"export {spec.name}",
        [file.relative_to(journal.folder).as_posix() for file in files],
        {"spec": asdict(spec), "quantized": None if done is None else asdict(done)},
    )
