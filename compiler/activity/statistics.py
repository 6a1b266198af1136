"""Collects activation statistics on calibration text, one layer at a time: shared by calibrate and recalibrate.

A file carries the hidden states of all tokens from layer to layer; memory holds one layer and the running blocks. A
unit is active if its signal is not zero; or, with a chosen density, if the selector picks it: then the pass continues
with the masked signals (ActiveFlow 4.1, DIP 3.2). Without one, the inputs of the layer's matrices are squared, too:
their means say how much each input counts when weights are rounded. Every layer's results are saved, so that an
interrupted run resumes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.array_rows import RowReader, RowWriter, row_checksums, writing_rows
from coldpress.compiler.activity.expert_counts import ExpertCounts, uses_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import (
    TOP_DENSITIES,
    ActivityRule,
    CalibrationText,
    LayerCounts,
    keys_of,
    leaders,
    multiplied_signals,
    top_selected,
)
from coldpress.compiler.activity.packed_bits import population
from coldpress.compiler.io import Workspace, checked_path, load_arrays
from coldpress.schemas.activations import FamilyStatistics, LayerStatistics, TopPrecision
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FAMILIES, FamilyName, Signal, activity_of, layers_of, num_units

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ACCELERATOR_TOKENS = 4096
"""Tokens that an accelerator runs at once; a processor's core runs one block."""


def collect(
    stream: LayerStream,
    text: CalibrationText,
    families: tuple[FamilyName, ...],
    activity: ActivityRule,
    work: Workspace,
) -> tuple[LayerStatistics, ...]:
    """Returns statistics of every layer, in order; `work` keeps the arrays, and between layers the hidden states."""
    collector = _Collector(stream, text, families, activity, work)
    found: list[LayerStatistics] = []
    for layer in range(stream.spec.num_hidden_layers):
        found.append(collector.layer(layer))
        work.remove(_hidden_key(layer))
        log.info("layer %d/%d", layer + 1, stream.spec.num_hidden_layers)
    return tuple(found)


def layer_record(
    layer: int,
    families: Mapping[FamilyName, tuple[int, ArrayFile]],
    before: Mapping[FamilyName, ArrayFile],
    inputs: ArrayFile,
    num_tokens: int,
    experts: ArrayFile | None = None,
    mean_squares: ArrayFile | None = None,
) -> LayerStatistics:
    """Makes the record of a layer: `families` have units and arrays, `before` the arrays of the layer before."""
    found = []
    for family, (units, arrays) in families.items():
        counts = load_arrays(arrays).get("counts")
        density = None if counts is None else int(counts.sum()) / (units * num_tokens)
        shared = None if density is None else _in_layer_before(family, arrays, before.get(family))
        found.append(
            FamilyStatistics(family=family, num_units=units, density=density, arrays=arrays, in_layer_before=shared)
        )
    similarity, precision = _across_layers(inputs, num_tokens) if layer else (None, ())
    return LayerStatistics(
        layer=layer,
        families=tuple(found),
        inputs=inputs,
        input_similarity=similarity,
        top_precision=precision,
        experts=experts and uses_of(experts),
        mean_squares=mean_squares,
    )


def _in_layer_before(family: FamilyName, arrays: ArrayFile, before: ArrayFile | None) -> float | None:
    """Share of active units that are active in the layer before, too; None unless unit i means the same in both."""
    if before is None or FAMILIES[family].axis != "hidden_size":
        return None
    bits, earlier = (load_arrays(file, "bits")["bits"] for file in (arrays, before))
    total = int(population(bits).sum())
    return int(population(bits & earlier).sum()) / total if total else None


def _across_layers(inputs: ArrayFile, num_tokens: int) -> tuple[float, tuple[TopPrecision, ...]]:
    """(mean cosine, precision of the largest inputs) with the layer before; all blocks have equally many tokens."""
    arrays = load_arrays(inputs, "block_similarity", "top_shared")
    with RowReader(checked_path(inputs)) as reader:
        hidden_size = reader.entries["mlp_inputs"].shape[1]
    selected = num_tokens * np.array(top_selected(hidden_size))
    shares = arrays["top_shared"].sum(axis=0) / selected
    precision = (TopPrecision(density=at, precision=float(p)) for at, p in zip(TOP_DENSITIES, shares, strict=True))
    return float(arrays["block_similarity"].mean()), tuple(precision)


def _hidden_key(layer: int) -> str:
    return f"hidden.{layer:03d}"


def key_of(layer: int, name: str) -> str:
    return f"{layer:03d}.{name}"


class _Collector:
    """Runs layer after layer; computes a layer only if an earlier run has not left all of its arrays."""

    def __init__(
        self,
        stream: LayerStream,
        text: CalibrationText,
        families: tuple[FamilyName, ...],
        activity: ActivityRule,
        work: Workspace,
    ) -> None:
        self._stream, self._text, self._activity, self._work = stream, text, activity, work
        shared = {name: (name,) for name in families} if activity.choice else leaders(families, stream.spec)
        self._counted = tuple(shared)
        self._source = {family: leader for leader, names in shared.items() for family in names}
        """Family -> the counted family that shares its statistics, in the order of `families`."""
        self._source = {family: self._source[family] for family in families}

    def layer(self, layer: int) -> LayerStatistics:
        files = self._present(layer)
        if files is None:
            self._compute(layer)
            files = self._present(layer)
        if files is None:
            raise ColdpressError(f"{self._work.folder}: the arrays of layer {layer} vanished while they were written")
        spec = self._stream.spec
        families = {
            family: (num_units(family, spec), files[source])
            for family, source in self._source.items()
            if layer in layers_of(family, spec)
        }
        earlier = {family: self._work.current(key_of(layer - 1, family)) for family in self._counted_in(layer - 1)}
        before = {family: file for family, file in earlier.items() if file}
        others = files["inputs"], self._text.tokens.size, files.get("experts"), files.get("squares")
        return layer_record(layer, families, before, *others)

    def _present(self, layer: int) -> dict[str, ArrayFile] | None:
        """Returns the layer's array files by name, if an earlier run has left all of them."""
        names = [*self._counted_in(layer), "inputs"]
        names += ["squares"] if self._squared(layer) else []
        names += ["experts"] if self._stream.spec.has_experts(layer) else []
        found = {name: self._work.current(key_of(layer, name)) for name in names}
        present = {name: file for name, file in found.items() if file is not None}
        return present if len(present) == len(found) else None

    def _counted_in(self, layer: int) -> list[FamilyName]:
        return [family for family in self._counted if layer in layers_of(family, self._stream.spec)]

    def _squared(self, layer: int) -> tuple[Signal, ...]:
        return () if self._activity.choice else multiplied_signals(layer, self._stream.spec)

    def _compute(self, layer: int) -> None:
        """Writes the layer's files: the next hidden states first, since `_present` takes the other files as proof of
        them; inputs last."""
        if layer and not self._work.has(_hidden_key(layer)):
            self._from_the_start(layer)
        num_blocks, num_tokens = len(self._text.tokens), self._text.tokens.size
        specs: dict[str, tuple[str, tuple[int, ...]]] = {
            "mlp_inputs": ("float16", (num_tokens, self._stream.spec.hidden_size))
        }
        if layer:
            specs["block_similarity"] = ("float64", (num_blocks,))
            specs["top_shared"] = ("int64", (num_blocks, len(TOP_DENSITIES)))
        previous = RowReader(self._work.path(key_of(layer - 1, "inputs"))) if layer else nullcontext()
        inputs = writing_rows(self._work.begin(key_of(layer, "inputs")), specs)
        with previous as before, inputs as writer:
            run = self._run(layer, writer, before)
            for family in self._counted_in(layer):
                self._work.save(key_of(layer, family), run.arrays(family))
            if run.squares:
                self._work.save(key_of(layer, "squares"), run.mean_squares())
            if run.experts is not None:
                self._work.save(key_of(layer, "experts"), run.experts.arrays(self._text.tasks, self._text.num_tasks))
            if layer:
                writer.write("block_similarity", 0, run.similarity)
                writer.write("top_shared", 0, run.shared)
        self._work.finish(key_of(layer, "inputs"))

    def _from_the_start(self, layer: int) -> None:
        """Recomputes the hidden states before `layer`: needed only if somebody has removed the file."""
        for earlier in range(layer):
            self._run(earlier, None, None)
            self._work.remove(_hidden_key(earlier))

    def _run(self, layer: int, inputs: RowWriter | None, previous: RowReader | None) -> LayerCounts:
        """Runs the layer over all blocks, and writes the hidden states after it to a file, unless it is the last."""
        spec, counted = self._stream.spec, self._counted_in(layer)
        signals: dict[str, Signal] = {family: activity_of(family, spec) for family in counted}
        num_blocks, block_tokens = self._text.tokens.shape
        experts = ExpertCounts(self._stream.model, layer, num_blocks) if self._stream.spec.has_experts(layer) else None
        squared = self._squared(layer)
        run = LayerCounts(layer, self._text, signals, self._activity, inputs, previous, experts, squared)
        step = 1 if self._stream.device.type == "cpu" else max(1, ACCELERATOR_TOKENS // block_tokens)
        loaded = self._stream.load_layer(layer, block_tokens)
        with self._hidden(layer) as read, self._following(layer) as writer:

            def batch(index: int) -> None:
                start, stop = index * step, min(num_blocks, (index + 1) * step)
                out = loaded.run(read(start, stop), run.hooks(start, stop - start))
                if writer:
                    rows = keys_of(out)
                    writer.write("hidden", start, rows)
                    writer.write("crc32c", start, row_checksums(rows))

            self._stream.each_block(loaded, batch, -(-num_blocks // step), step)
        return run

    @contextmanager
    def _hidden(self, layer: int) -> "Iterator[Callable[[int, int], Tensor]]":
        """Yields what reads the hidden states before the layer for some blocks, [stop - start, T, hidden_size]."""
        import torch

        if layer == 0:
            yield lambda start, stop: self._stream.embed(self._text.tokens[start:stop])
            return
        size = (self._text.tokens.shape[1], self._stream.spec.hidden_size)
        with RowReader(self._work.path(_hidden_key(layer))) as reader:

            def read(start: int, stop: int) -> "Tensor":
                hidden = torch.empty((stop - start, *size), dtype=self._stream.dtype)
                reader.read_checked("hidden", "crc32c", start, keys_of(hidden))
                return hidden

            yield read

    @contextmanager
    def _following(self, layer: int) -> Iterator[RowWriter | None]:
        """Yields the writer of the hidden states after the layer, stored as integers with the bits of the floats. The
        file is the stage's largest and short-lived, so blocks carry checksums instead of a digest that needs another
        read."""
        if layer + 1 == self._stream.spec.num_hidden_layers:
            yield None
            return
        kind = "uint16" if self._stream.dtype.itemsize == 2 else "uint32"
        shape = self._text.tokens.shape
        specs = {"hidden": (kind, (*shape, self._stream.spec.hidden_size)), "crc32c": ("uint32", shape[:1])}
        with writing_rows(self._work.begin(_hidden_key(layer + 1)), specs) as writer:
            yield writer
        self._work.finish_checked_rows(_hidden_key(layer + 1))
