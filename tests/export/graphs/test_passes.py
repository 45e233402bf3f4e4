from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

from eagle_export.graphs import passes
from eagle_export.graphs.export import _Flat, _translate
from eagle_export.models.ops import linear

FEATURES = {"x": {0: "B"}}


class Layer(nn.Module):
    """Two projections of the same rows, which the passes merge, and one of their product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.gate = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = linear(x, self.up.weight) * linear(x, self.gate.weight)
        return x + linear(inner, self.down.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in self.model.layers:
            x = layer(x)
        return (x + 1,)


@pytest.fixture(scope="module")
def cleaned() -> ir.Model:
    """The model, traced as `export_graph` does and cleaned."""
    program = torch.export.export(
        _Flat(Model()),
        (torch.zeros(3, 4),),
        dynamic_shapes={"tensors": ({0: torch.export.Dim("B", min=1)},)},
        strict=False,
    )
    model = _translate(program)
    passes.clean(model, ["x"], ["y"], FEATURES, name="target", prefix="module.model.")
    return model


def test_nodes_are_named_by_the_modules_they_come_from(cleaned: ir.Model) -> None:
    names = [node.name for node in cleaned.graph if node.op_type != "Constant"]
    assert names[:6] == [
        "layers.0/MatMul",
        "layers.0/Split",
        "layers.0/Mul",
        "layers.0/MatMul_1",
        "layers.0/Add",
        "layers.1/MatMul",
    ]
    assert names[-1] == "Add"  # no module's but the graph's own
    assert len(set(names)) == len(names)


def test_no_metadata_is_left(cleaned: ir.Model) -> None:
    assert all(not node.metadata_props for node in cleaned.graph)


def scoped(op_type: str, *scopes: str) -> ir.Node:
    """A node with the exporter's note of the modules around it."""
    note = repr(["", *scopes, op_type.lower()])
    return ir.node(op_type, [ir.val("a"), ir.val("b")], metadata_props={passes._SCOPES: note})


def named(nodes: list[ir.Node], prefix: str = "module.model.") -> list[str | None]:
    graph = ir.Graph([], [], nodes=nodes, opset_imports={"": 24})
    passes.name_nodes(ir.Model(graph, ir_version=11), prefix)
    return [node.name for node in nodes]


def test_the_innermost_module_counts_and_the_prefix_goes() -> None:
    layer = ("module", "module.model.layers.3", "module.model.layers.3.self_attn")
    nodes = [
        scoped("Attention", *layer),
        scoped("Add", *layer[:2]),
        scoped("Add", *layer[:2]),
        scoped("Mul", "module"),
        scoped("Cast", "module", "module.norm"),
        ir.node("Shape", [ir.val("c")]),  # made by a pass
        scoped("Squeeze", "_empty_nn_module_stack_from_metadata_hook"),
    ]
    assert named(nodes) == [
        "layers.3.self_attn/Attention",
        "layers.3/Add",
        "layers.3/Add_1",
        "Mul",
        "norm/Cast",
        "Shape",
        "Squeeze",
    ]


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        (("module.l.q_proj", "module.l.k_proj", "module.l.v_proj"), "l.q_proj+k_proj+v_proj/MatMul"),
        (("module.l.mlp.gate", "module.l.mlp.up"), "l.mlp.gate+up/MatMul"),
        (("module.a.one", "module.b.two"), "a.one+module.b.two/MatMul"),
        (("", ""), "MatMul"),
    ],
)
def test_a_merged_product_has_the_names_of_its_parts(scopes: tuple[str, ...], name: str) -> None:
    node = ir.node("MatMul", [ir.val("a"), ir.val("b")], metadata_props=passes._joined_scope(list(scopes)))
    assert named([node], "module.") == [name]
