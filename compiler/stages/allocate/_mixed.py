"""Gives each matrix, and the head, a format of its own, so that a model fills the bytes that it may take. A layer's
experts share the format of each matrix, which has the name of the first expert's.

From the smallest format everywhere, each byte goes where it saves most divergence (search/by_layer.py). The divergence
of a matrix in a format is estimated from its sensitivity and the errors of some rows, and estimates are added up; the
chosen formats are then measured together.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coldpress.compiler.activity.sensitivity import Sensitivity
from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT, formats_for
from coldpress.compiler.cost_model import slice_bytes, stored_format, tensor_bytes
from coldpress.compiler.kept_codes import keeping, own_format
from coldpress.compiler.rounding._matrix import Rounding, choose_codes, on_one_core
from coldpress.compiler.rounding._weights import Weights
from coldpress.compiler.search.by_layer import LayerOptions, Sizes, path_of
from coldpress.runtime.kernels.products import decode_rows
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._mixed import coarsest
from coldpress.schemas.curves import HeadLoss, MatrixLoss
from coldpress.schemas.families import (
    BLOCKS,
    FormatName,
    Formats,
    HeadFormat,
    LayerFormats,
    kept_of,
    layers_of,
    num_units,
    slice_shape,
    slices,
    unit_format,
    unit_role,
    with_head,
    with_kept,
)
from coldpress.schemas.model import MLP_ROLES, Model, matrices, role_shape

Effects = Mapping[str, Mapping[FormatName, float]]
"""Matrix -> format -> divergence, in nats per token."""
SAMPLE_ROWS, LEAST_ROWS = 256, 8
"""Rows that are rounded to judge a format, divided among the matrices that share it, and the fewest of each matrix.
1,024 rows gave formats that were no better (docs/experiments/product.md)."""


@dataclass(frozen=True)
class Mixes:
    """Formats by matrix, from the smallest of each matrix to the one that loses least."""

    model: Model
    effects: Effects
    heads: Sequence[HeadLoss]
    """Formats of the head that are smaller than the usual one, the largest first."""

    def formats(self, sizes: Sizes) -> Formats:
        """Returns the formats at the given positions, one for each matrix and the last for the head, smallest first."""
        *_, head = sizes
        found = self._of_layers(self.chosen(sizes))
        return found if head == len(self.heads) else self._with_head(found, self.heads[-1 - head])

    def chosen(self, sizes: Sizes) -> dict[str, FormatName]:
        return {role: names[at] for (role, names), at in zip(self._names.items(), sizes[:-1], strict=True)}

    def layers(self, sizes: Sizes) -> Formats:
        """Returns the formats at these sizes beside the usual head."""
        return self.formats((*sizes[:-1], len(self.heads)))

    def losses(self, sizes: Sizes) -> tuple[MatrixLoss, ...]:
        return tuple(
            MatrixLoss(role=role, format=name, mean_kld=self.effects[role][name])
            for role, name in self.chosen(sizes).items()
        )

    @cached_property
    def path(self) -> list[Sizes]:
        return path_of(self._options)

    @cached_property
    def lost(self) -> list[float]:
        """The expected divergence of each step of the path, in nats per token."""
        return [layers + head for layers, head in self.parts]

    @cached_property
    def parts(self) -> list[tuple[float, float]]:
        """The expected divergence of layers and of the head at each step of the path."""
        effects = [options.effect for options in self._options]
        return [
            (sum(own[at] for own, at in zip(effects[:-1], sizes[:-1], strict=True)), effects[-1][sizes[-1]])
            for sizes in self.path
        ]

    def expected(self, name: LayerFormats) -> float:
        """Returns the expected divergence with the MLPs' matrices in `name`'s coarsest format, if theirs are larger."""
        own = (effects for role, effects in self.effects.items() if unit_role(role, self.model.spec) in MLP_ROLES)
        return sum(effects.get(coarsest(name), 0.0) for effects in own)

    def first_within(self, most: float, factor: float) -> int:
        """Returns the position of the smallest sizes that are expected to lose at most `most`, if layers lose `factor`
        times what was expected of them; the last if none is."""
        lost = (factor * layers + head for layers, head in self.parts)
        return next((at for at, own in enumerate(lost) if own <= most), len(self.path) - 1)

    @cached_property
    def _names(self) -> dict[str, list[FormatName]]:
        """The formats of each matrix, the smallest first; each loses less than all smaller ones."""
        found: dict[str, list[FormatName]] = {}
        for role, effects in self.effects.items():
            least = float("inf")
            for name in sorted(effects, key=lambda name: (_bytes_of(self.model, role, name), effects[name], name)):
                if effects[name] < least:
                    found.setdefault(role, []).append(name)
                    least = effects[name]
        return found

    @cached_property
    def _options(self) -> list[LayerOptions]:
        each = [
            LayerOptions(
                tuple(_bytes_of(self.model, role, name) for name in names),
                tuple(self.effects[role][name] for name in names),
            )
            for role, names in self._names.items()
        ]
        return [*each, self._of_head()]

    def _of_layers(self, chosen: Mapping[str, FormatName]) -> Formats:
        spec = self.model.spec
        roles = [piece.role for piece in slices(BLOCKS, spec)]
        own = {
            layer: unit_format([chosen[f"layers.{layer}.{matrices(role, spec)[0]}.weight"] for role in roles])
            for layer in layers_of(BLOCKS, spec)
        }
        others = coarsest(tuple(own.values()))
        layers = tuple(own.get(layer, others) for layer in range(spec.num_hidden_layers))
        outside = {role: one.format for one in kept_of(keeping(self.model, layers)) for role in one.roles}
        outside |= {role: name for role, name in chosen.items() if unit_role(role, spec) not in MLP_ROLES}
        return with_kept(layers, {role: name for role, name in outside.items() if name != stored_format(role, layers)})

    def _of_head(self) -> LayerOptions:
        usual = self._of_layers({role: names[-1] for role, names in self._names.items()})
        smaller = [self._with_head(usual, loss) for loss in reversed(self.heads)]
        role = self.model.spec.head_role
        nbytes = (tensor_bytes(role, role_shape(self.model.spec, role), one) for one in (*smaller, usual))
        return LayerOptions(tuple(nbytes), (*(loss.mean_kld for loss in reversed(self.heads)), 0.0))

    def _with_head(self, formats: Formats, loss: HeadLoss) -> Formats:
        return with_head(formats, HeadFormat(role=self.model.spec.head_role, format=loss.format))


def last_that_fits(path: Sequence[Sizes], fits: Callable[[Sizes], bool]) -> int:
    """Returns the position of the largest sizes that fit, if all smaller ones do, too; -1 if none does."""
    return bisect_left(path, True, key=lambda sizes: not fits(sizes)) - 1


def expected_effects(
    model: Model, rounding: Rounding, sensitivities: Mapping[str, Sensitivity], threads: int
) -> Effects:
    """Returns the divergence to expect of each matrix of the layers in each format that it may have; raises
    CheckpointError if a value is beyond a format's range."""
    formats, sharing = formats_of_matrices(model), _sharing(model)

    def of_matrix(role: str) -> dict[FormatName, float]:
        members = sharing[role]
        own = _own_format(model, members)
        effects = dict.fromkeys(formats[role], 0.0)
        rounded = [name for name in formats[role] if name != own]
        for member in members:
            if member in sensitivities:  # else an expert that no token uses
                found = expected_divergence(rounding, model, member, sensitivities[member], rounded, len(members))
                effects |= {name: effects[name] + found[name] for name in rounded}
        return effects

    with on_one_core(rounding.algorithm), ThreadPoolExecutor(threads) as pool:
        return dict(zip(formats, pool.map(of_matrix, formats), strict=True))


def formats_of_matrices(model: Model) -> dict[str, tuple[FormatName, ...]]:
    """Lists the formats of each matrix of the layers, by role, the smallest first: a quantized file's own, which loses
    nothing, and all that are smaller."""
    return {role: _formats_of(model, members) for role, members in _sharing(model).items()}


def _sharing(model: Model) -> dict[str, tuple[str, ...]]:
    """Maps each matrix of the layers to the matrices that share its format: an expert's to those of all experts of the
    layer, under the first one's role; every other matrix to itself."""
    spec = model.spec
    in_units = [
        tuple(f"layers.{layer}.{name}.weight" for name in matrices(piece.role, spec))
        for layer in layers_of(BLOCKS, spec)
        for piece in slices(BLOCKS, spec)
    ]
    by_first = {members[0]: members for members in in_units}
    rest = {role for members in in_units for role in members[1:]}
    roles = (role for role in model.tensors if role.startswith("layers.") and stored_format(role, DEFAULT_FORMAT))
    return {role: by_first.get(role, (role,)) for role in roles if role not in rest}


def _own_format(model: Model, members: Sequence[str]) -> FormatName | None:
    """Returns the one format that these matrices have in a quantized file; None if they have none, or several."""
    found = {own_format(model, member) for member in members}
    return found.pop() if len(found) == 1 else None


def _formats_of(model: Model, members: Sequence[str]) -> tuple[FormatName, ...]:
    own, (_, length) = _own_format(model, members), _slices(model, members[0])
    known = {name: load("coldpress.runtime.quantization", Format, name) for name in formats_for(AUTO)}
    most_bytes = float("inf") if own is None else slice_bytes(length, own)
    fitting = [
        name
        for name, codec in known.items()
        if name == own or (length % codec.MULTIPLE == 0 and slice_bytes(length, name) < most_bytes)
    ]
    return tuple(sorted(fitting, key=lambda name: (slice_bytes(length, name), name)))


def _bytes_of(model: Model, role: str, name: FormatName) -> int:
    count, length = _slices(model, role)
    return count * slice_bytes(length, name)


def _slices(model: Model, role: str) -> tuple[int, int]:
    """Returns how many slices a matrix is stored in, and the values of each."""
    matrix = unit_role(role, model.spec)
    piece = next((piece for piece in slices(BLOCKS, model.spec) if piece.role == matrix), None)
    if piece is None:
        rows, columns = model.tensors[role].shape
        return rows, columns
    count, length = slice_shape(piece, model.spec)
    return count * num_units(BLOCKS, model.spec), length


def expected_divergence(
    rounding: Rounding,
    model: Model,
    role: str,
    sensitivity: Sensitivity,
    formats: Sequence[FormatName],
    num_sharing: int = 1,
) -> Mapping[FormatName, float]:
    """Returns the divergence, in nats per token, that each format of a matrix is expected to cause by itself.
    `num_sharing` matrices share the format, and divide SAMPLE_ROWS among them. Raises CheckpointError if a value is
    beyond a format's range."""
    weights = rounding.weights(model, role, "row")
    num_rows = min(weights.count, max(LEAST_ROWS, SAMPLE_ROWS // num_sharing))
    at = np.unique(np.linspace(0, weights.count - 1, num_rows).astype(np.int64))
    rows = weights.read(0, weights.count)[at]
    # leave out the source's own codes: they belong to all rows, not to the sample
    sample = Weights(
        len(rows), weights.length, "row", lambda start, stop: rows[start:stop], weights.gram, weights.importance
    )
    by_row = sensitivity.outputs[at].astype(np.float64)
    by_row *= sensitivity.outputs.sum(dtype=np.float64) / max(by_row.sum(), np.finfo(np.float64).tiny)
    return {name: float(by_row @ _errors(rounding, sample, role, name, sensitivity.inputs)) for name in formats}


def _errors(rounding: Rounding, sample: Weights, role: str, name: FormatName, inputs: np.ndarray) -> np.ndarray:
    """Returns each row's squared error, weighted by the sensitivity to inputs, float64 [rows]."""
    codes = choose_codes(rounding.algorithm, sample, role, name)
    errors = decode_rows(codes, sample.length, name, num_threads=1) - sample.read(0, sample.count)
    return (errors.astype(np.float64) ** 2) @ inputs.astype(np.float64)
