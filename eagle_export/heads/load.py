"""load_head: a checkpoint folder to a HeadSpec and canonical tensors, checked against the target.

Everything that can be wrong with a head is found here, before anything is traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_export.checkpoints import weights
from eagle_export.checkpoints.pickled import load_pickled
from eagle_export.checkpoints.stored import all_finite, marked
from eagle_export.heads import names, safeai
from eagle_export.heads.detect import DIALECTS, detect_dialect
from eagle_export.heads.settings import UNSAID, HeadSettings
from eagle_export.heads.spec import Config, HeadSpec, TargetSizes, Tensors, expected_shapes, raw_last
from eagle_run.dtypes import dtype_of
from eagle_run.errors import EagleError, first_line

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class LoadedHead:
    """A head that fits its target.

    tensors          canonical name -> tensor in the checkpoint's dtype, exactly `expected_shapes(spec)`.
    draft_to_target  int64 [Vd]: target vocabulary id of each draft vocabulary id.
    settings         what a person or a recipe said about it.
    """

    folder: Path
    spec: HeadSpec
    tensors: Tensors
    draft_to_target: Tensor
    settings: HeadSettings = UNSAID


def load_head(folder: Path, target: TargetSizes, settings: HeadSettings = UNSAID) -> LoadedHead:
    """Read a head (config.json and model.safetensors or pytorch_model.bin, whole or in shards).

    `settings` override what the checkpoint says of itself, or leaves to defaults. Raises EagleError when
    files are missing or damaged, tensors are missing, left over, misshapen or not finite, a flag cannot be
    honoured, the vocabulary map is broken, or the head is of another target.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tensors = names.canonical(
        {name: tensor for path in weights.model_files(folder) for name, tensor in _read_file(path).items()}
    )
    spec, tensors = DIALECTS[detect_dialect(config, tensors)](config, tensors, target)
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    spec = settings.apply(_in_our_numbers(spec, target.layers))
    _check_target(spec, target)
    _check_layers(spec, target, tensors)
    _check_tensors(spec, tensors)
    draft_to_target = _vocabulary_map(spec, offsets, mask)
    return LoadedHead(folder, spec, tensors, draft_to_target, settings)


def _read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.is_file():
        raise EagleError(
            f"no {path.name} in {folder}", hint="a head is a folder with config.json and its weights"
        )
    return weights.read_json(path)


def _read_file(path: Path) -> Tensors:
    from safetensors.torch import load_file

    fault = " is damaged or not what its name says"
    hint = "download the head again; it may have been cut short"
    if path.suffix == ".safetensors":
        try:
            return marked(load_file(path), path)
        except Exception as error:  # the library raises whatever its parser runs into
            raise EagleError(f"{path}{fault}: {first_line(error)}", hint=hint) from error
    loaded = load_pickled(path, fault, hint=hint)
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise EagleError(
            f"{path} does not hold a plain table of tensors, but {_kind_of(loaded)}",
            hint="save the head's state_dict alone, best as model.safetensors",
        )
    return {str(name): tensor for name, tensor in loaded.items()}


def _kind_of(loaded: object) -> str:
    """What a file holds that is no table of tensors, in words."""
    if not isinstance(loaded, dict):
        return f"a {type(loaded).__name__}"
    name, value = next((name, value) for name, value in loaded.items() if not isinstance(value, Tensor))
    return f"{name} is a {type(value).__name__}"


def _check_target(spec: HeadSpec, target: TargetSizes) -> None:
    expected = spec.target_hidden_size if spec.has_fuse else spec.hidden_size
    if expected != target.hidden_size:
        raise EagleError(
            f"the head was made for a target with hidden size {expected}, this target has "
            f"{target.hidden_size}",
            hint="a head works only with the target it was trained on",
        )
    if spec.vocab_size != target.vocab_size:
        raise EagleError(
            f"the head was made for a vocabulary of {spec.vocab_size} tokens, this target has "
            f"{target.vocab_size}",
            hint="a head works only with the target it was trained on",
        )
    if spec.draft_vocab_size > spec.vocab_size:
        raise EagleError(
            f"config.json of the head: draft_vocab_size {spec.draft_vocab_size} exceeds vocab_size "
            f"{spec.vocab_size}",
            hint=safeai.CORRECT,
        )
    if not spec.own_embedding and spec.hidden_size != target.hidden_size:
        reason = f"the draft is {spec.hidden_size} wide, so the target's embedding does not fit"
        raise safeai.missing(["embed_tokens.weight"], reason)


def _in_our_numbers(spec: HeadSpec, layers: int) -> HeadSpec:
    """Of what a checkpoint says: in all of its numberings, id L is the last layer without the final norm."""
    if not spec.has_fuse:
        return spec
    ids = tuple(i + (i >= layers) for i in spec.feature_layers)
    return replace(spec, feature_layers=ids)


def _check_layers(spec: HeadSpec, target: TargetSizes, tensors: Tensors) -> None:
    ids, layers = spec.feature_layers, target.layers
    if spec.algorithm == "eagle1" or not spec.has_fc:
        if ids != (layers,):
            kind = "an EAGLE-1 head" if spec.algorithm == "eagle1" else "a head without fc"
            raise EagleError(
                f"layer ids {list(ids)} for {kind}: it takes the last hidden state only, [{layers}]",
                hint="leave the layer ids out, or layer_ids in the recipe",
                parameters=["head_layer_ids"],
            )
        return
    last = raw_last(layers)
    if list(ids) != sorted(set(ids)) or not all(0 <= i <= last for i in ids):
        raise EagleError(
            f"layer ids {list(ids)} do not fit a target of {layers} layers: ascending numbers from 0 to "
            f"{last} are expected, where {layers} is the output of the final norm and {last} what that norm "
            "reads",
            hint="where the head names none they are 2, L//2 and L-3; a build takes others, as indices into "
            "Transformers' hidden_states",
            parameters=["head_layer_ids"],
        )
    width = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else spec.feature_width
    if width != spec.feature_width:
        raise EagleError(
            f"fc.weight of the head takes {width} features, which is not {len(ids)} layers {list(ids)} of "
            f"hidden size {target.hidden_size} ({spec.feature_width})",
            hint="use the head of this target; a build takes other layers where the head says them wrongly",
            parameters=["head_layer_ids"],
        )


def _check_tensors(spec: HeadSpec, tensors: Tensors) -> None:
    shapes = expected_shapes(spec)
    absent, extra = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if absent:
        raise safeai.missing(
            names.as_written(absent, spec), f"{spec.algorithm} heads of the {spec.dialect} kind have it"
        )
    if extra:
        raise EagleError(
            "the head's checkpoint has tensors that nothing uses: "
            f"{safeai.listed(names.as_written(extra, spec))}",
            hint="either the head is of a kind that is not supported, or config.json lacks a flag for them",
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise EagleError(
                f"{name} of the head has shape {list(tensor.shape)}, config.json asks for {list(shape)}",
                hint="config.json and the weights are of different heads",
            )
        if tensor.dtype not in FLOATS:
            raise EagleError(
                f"{name} of the head is {dtype_of(tensor.dtype).name}; float32, float16 or "
                "bfloat16 is expected",
                hint="use the checkpoint that is not quantised",
            )
        if not all_finite(tensor):
            raise EagleError(
                f"{name} of the head holds values that are not finite numbers",
                hint="download the head again; if it is the same, its training failed",
            )


def _vocabulary_map(spec: HeadSpec, offsets: Tensor | None, mask: Tensor | None) -> Tensor:
    """d2t holds offsets: the target id of draft id i is i + d2t[i]. Without it both vocabularies are one."""
    size, vocab = spec.draft_vocab_size, spec.vocab_size
    own = torch.arange(size)
    if spec.algorithm == "eagle1" or (offsets is None and size == vocab):
        return own
    if offsets is None:
        raise safeai.missing(["d2t"], f"the draft vocabulary has {size} of {vocab} tokens")
    if offsets.dtype.is_floating_point or offsets.dtype == torch.bool or tuple(offsets.shape) != (size,):
        raise EagleError(
            f"d2t of the head is {dtype_of(offsets.dtype).name}{list(offsets.shape)}; "
            f"whole numbers [{size}] are expected",
            hint="d2t holds one offset (target id minus draft id) for each row of lm_head",
        )
    ids = own + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise EagleError(
            f"d2t of the head leads out of the vocabulary of {vocab} tokens: ids {int(ids.min())} to "
            f"{int(ids.max())}",
            hint="d2t must hold offsets (target id minus draft id)",
        )
    if ids.unique().numel() != size:
        twice = ids.unique(return_counts=True)
        repeated = twice[0][twice[1] > 1]
        raise EagleError(
            f"d2t of the head maps several draft ids to one target id ({len(repeated)} target ids have more "
            f"than one, the first is {int(repeated[0])})",
            hint="d2t must hold offsets (target id minus draft id)",
        )
    if mask is None and 1 < size < vocab and offsets.unique().numel() == size:
        raise EagleError(  # thousands of offsets repeat, in whatever order the ids are
            f"d2t of the head holds {size} different numbers, as target ids would be, and there is no t2d to "
            "tell; offsets are expected, which repeat",
            hint="if they are ids, store d2t as target id minus draft id",
        )
    if mask is not None and size < vocab:
        marked = mask.nonzero().flatten() if tuple(mask.shape) == (vocab,) else mask.new_empty(0)
        if not torch.equal(marked, ids.sort().values):
            raise EagleError(
                "t2d of the head does not mark the target ids that d2t leads to",
                hint="d2t must hold offsets (target id minus draft id)",
            )
    return ids
