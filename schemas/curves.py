"""Losses of a model by left-out units and rounded weights, and signals of text that nothing was fitted to.

Arrays of the trace: `<layer>.<signal>` float16 [num_tokens, n], the signal of each token of consecutive blocks in the
whole model (schemas/families.py), rounded to five bits of mantissa: two units change places only if their magnitudes
differ by less than 3 %, and one chosen unit in 300 is another one; `<layer>.router_scores` of a mixture, in all bits
of float16; and `<layer>.<family>.unit_norms` float32 [num_units], the norms of units' weights. The file is compressed
(runtime/artifact/byte_planes.py).
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, Extended, PositiveCount, Record, Sha256, Share
from coldpress.schemas.families import (
    WHOLE_MLP,
    FamilyName,
    FormatName,
    Formats,
    KeptFormat,
    LayerFormats,
    Method,
    with_own,
)
from coldpress.schemas.layout import KvCacheFormat, RoutingName


class Loss(Record):
    """Distance of a changed model from the source, on text that nothing was fitted to."""

    mean_kld: float
    """Mean Kullback-Leibler divergence of next-token distributions, nats per token."""
    mean_kld_error: float | None
    """Standard error over blocks; None for one block."""
    p999_kld: float
    """99.9th percentile over tokens."""
    ppl_ratio: float = Field(gt=0)
    ppl_ratio_error: float | None
    """Standard error over blocks, of the ratio; None for one block."""


class Point(Loss):
    """A selector at one density."""

    density: Share
    """Share of the MLP's weights that a token uses, in a mixture of the experts that the router picks: the same in all
    layers, divided among families by the selector."""


class Curve(Record):
    """A selector at several densities, in the source's own weights."""

    method: Method
    resident_share: Share | None = None
    """Share of each family that an LFU cache held, for a selector whose choice depends on residency; else None."""
    points: tuple[Point, ...]
    """By ascending density."""


class MatrixLoss(Record):
    """The divergence, in nats per token, to expect of one matrix in a format, or of that of all experts of a layer."""

    role: str
    format: FormatName
    mean_kld: float = Field(ge=0)


class FormatLoss(Loss):
    """All layers' matrices rounded in formats, and every unit used."""

    format: LayerFormats
    family: FamilyName = WHOLE_MLP
    """The family in whose slices the MLP's matrices were rounded: a column of down loses more than a row."""
    kept: tuple[KeptFormat, ...] = ()
    """Formats of matrices outside of MLPs, where they were chosen one by one."""
    expected: tuple[MatrixLoss, ...] = ()
    """The losses by which formats were chosen, where each matrix has its own."""

    @property
    def formats(self) -> Formats:
        return with_own(self.format, kept=self.kept)


class HeadLoss(Loss):
    """The head rounded to nearest in a format, and every unit used."""

    format: FormatName


class KvCacheLoss(Loss):
    """Keys and values as a KV cache in a format holds them, and every unit used."""

    kv_cache: KvCacheFormat


class RoutedPoint(Loss):
    """Routers that prefer experts in DRAM with one strength in all layers, and every unit of their experts used."""

    strength: float = Field(gt=0)


class RoutingCurve(Record):
    """A way of routing at several strengths."""

    routing: RoutingName
    resident_share: Share
    """Share of the experts' units that an LFU cache held."""
    points: tuple[RoutedPoint, ...]
    """By ascending strength."""


class Unexplored(Record):
    method: Method
    reason: str


class Curves(Extended):
    """The result of `explore`; depends on the model and its text, not on a device."""

    LATER = ("heads",)

    weights_sha256: Sha256
    num_tokens: PositiveCount
    block_tokens: PositiveCount
    curves: tuple[Curve, ...]
    formats: tuple[FormatLoss, ...]
    heads: tuple[HeadLoss, ...] = ()
    """Losses of the head in formats that take fewer bytes than the one that goes with the layers', which is taken to
    lose nothing; with the embeddings, where they are tied to it."""
    kv_caches: tuple[KvCacheLoss, ...] = ()
    """Losses of the formats that take fewer bytes than the default one, which is taken to lose nothing."""
    routings: tuple[RoutingCurve, ...] = ()
    """Curves of a mixture's ways of routing that see residency; empty where no search may take one."""
    unexplored: tuple[Unexplored, ...]
    trace: ArrayFile
    trace_layers: tuple[Count, ...]

    def of(self, method: Method) -> tuple[Curve, ...]:
        """Returns a selector's curves, by ascending resident share; one for most selectors, none if it has none."""
        return tuple(found for found in self.curves if found.method == method)

    def with_losses_of(self, other: "Curves | None") -> "Curves":
        """Returns what was measured of the model later, with this trace; None: nothing more was."""
        return self if other is None else other.model_copy(update={"trace": self.trace})

    def format_loss(self, formats: LayerFormats, family: FamilyName) -> FormatLoss | None:
        return next((one for one in self.formats if (one.format, one.family) == (formats, family)), None)
