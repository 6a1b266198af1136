"""The modelled clock: the seconds that decoded tokens take on a device, request by request.

`Clock` is an observer of the store; simulations attach it, and so do runs that ask for modelled seconds. Flash time
follows the device profile's law. Memory time is bytes over DRAM bandwidth: the computation reads every weight that it
uses once, and storing a unit copies it from the read buffer to its slot, which reads and writes it. LLM in a flash 3
has the same three parts (I/O, memory management, computing), but measures them and adds them up; nominal bandwidth
gives a lower bound of the last two. A request computes with and copies the first units while it reads the rest, so it
takes the longer of the two times. Resident weights are used between requests, because the next request depends on
their results; only reads ahead run meanwhile.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from coldpress.runtime.artifact.contents import Layout, layout_bytes, nbytes, resident_tensors
from coldpress.runtime.extents import Extents
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import AheadFacts, Observer, RequestFacts
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from coldpress.schemas.families import FAMILIES, WHOLE_MLP, FamilyName, used_share
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES, MatrixRole, ModelSpec, matrices
from coldpress.schemas.predictors import matrix_shapes

LOOKUP_TABLES = ("embed_tokens.weight", "embed_positions.weight")
"""Tables from which a token reads one row, unless the embedding is also the head."""
COPY_PASSES = 2
"""A copy reads each byte and writes it."""


class HasRank(Protocol):
    """A layer's predictor, in a manifest or still to be written to one."""

    @property
    def rank(self) -> int:
        """Rows of its first matrix."""
        ...

    @property
    def format(self) -> str:
        """How its rows are stored."""
        ...


def looked_up_roles(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the tables from which a token reads one row."""
    return LOOKUP_TABLES[spec.tie_word_embeddings :]


def computed_bytes(manifest: Manifest, plan: Plan) -> int:
    """Returns the bytes of DRAM that a token reads besides units: resident weights, predictors, half the KV cache.

    Half the KV cache is the mean over a full context. In a mixture only the resident experts that a token uses count.
    """
    spec, tensors = manifest.model, resident_tensors(manifest)
    looked_up = layout_bytes({role: tensors[role] for role in looked_up_roles(spec) if role in tensors})
    layers = range(spec.num_hidden_layers)
    idle = sum(_held_bytes(tensors, spec, layer, role) for layer in layers for role in MLP_ROLES)
    idle -= sum(_multiplied_bytes(tensors, spec, layer, MLP_ROLES) for layer in layers)
    return plan.resident_bytes - looked_up - idle + _predicting_bytes(manifest, plan) + plan.kv_cache_bytes // 2


def _held_bytes(tensors: Layout, spec: ModelSpec, layer: int, role: MatrixRole) -> int:
    """Returns the bytes of a layer's resident matrices with one role."""
    names = [f"layers.{layer}.{name}.weight" for name in matrices(role, spec)]
    return layout_bytes({name: tensors[name] for name in names if name in tensors})


def _multiplied_bytes(tensors: Layout, spec: ModelSpec, layer: int, roles: Iterable[MatrixRole]) -> int:
    """Returns the bytes of a layer's resident matrices that a token multiplies; of experts only those it uses."""
    share = used_share(WHOLE_MLP, spec)
    held = {role: _held_bytes(tensors, spec, layer, role) for role in roles}
    return sum(round(share * size) if role in MLP_ROLES else size for role, size in held.items())


def scored_bytes(spec: ModelSpec, predictors: Iterable[HasRank]) -> int:
    """Returns the bytes of predictors that a token multiplies; of each second matrix only the rows of its experts."""
    used, total = used_share(WHOLE_MLP, spec), 0
    for entry in predictors:
        first, second = (
            rows * nbytes(entry.format, columns) for rows, columns in matrix_shapes(spec, entry.rank).values()
        )
        total += first + round(used * second)
    return total


def _predicting_bytes(manifest: Manifest, plan: Plan) -> int:
    return scored_bytes(manifest.model, manifest.predictors) if plan.predictor_bytes else 0


def fetch_seconds(device: DeviceProfile, flash_s: float, active_bytes: int, kept_bytes: int) -> float:
    """Returns the seconds of one request for units: reading, or computing and copying, whichever takes longer.

    Args:
        device: Gives the DRAM bandwidth.
        flash_s: Seconds of its reads.
        active_bytes: Bytes of the units that are used, from DRAM or from flash.
        kept_bytes: Bytes of the units that were read and go to slots.
    """
    return max(flash_s, (active_bytes + COPY_PASSES * kept_bytes) / device.dram_bytes_per_s.value)


def dram_seconds(
    device: DeviceProfile, computed_per_token: int, num_tokens: int, active_bytes: int = 0, kept_bytes: int = 0
) -> float:
    """Returns the memory time of decoded tokens in seconds.

    Args:
        device: Gives the DRAM bandwidth.
        computed_per_token: From `computed_bytes`.
        num_tokens: Decoded tokens.
        active_bytes: See `fetch_seconds`; the sum over all requests.
        kept_bytes: See `fetch_seconds`; the sum over all requests.
    """
    moved = num_tokens * computed_per_token + active_bytes + COPY_PASSES * kept_bytes
    return moved / device.dram_bytes_per_s.value


def bytes_before(manifest: Manifest, plan: Plan) -> dict[tuple[int, FamilyName], int]:
    """Returns, for each layer's first request for MLP units, the bytes of resident weights and KV cache used before it.

    Reads ahead run in that time. Bytes used later in a layer, and the head's, are not counted.
    """
    families = [entry.family for entry in manifest.families]
    first = next((name for name in families if set(FAMILIES[name].roles) & set(MLP_ROLES)), None)
    if first is None:
        return {}
    num_layers, tensors = manifest.model.num_hidden_layers, resident_tensors(manifest)
    early: list[MatrixRole] = [role for role in (*ATTENTION_ROLES, *MLP_ROLES) if role != "down_proj"]
    shared = (plan.kv_cache_bytes // 2 + _predicting_bytes(manifest, plan)) // num_layers
    return {
        (layer, first): _multiplied_bytes(tensors, manifest.model, layer, early) + shared for layer in range(num_layers)
    }


class FlashQueue:
    """A modelled device that serves reads in order while the processor computes from memory."""

    def __init__(self, device: DeviceProfile) -> None:
        """Begins with nothing to read."""
        self._device, self._left_s = device, 0.0

    def begin(self, flash_s: float) -> None:
        """Queues reads that nobody waits for yet."""
        self._left_s += flash_s

    def compute(self, num_bytes: int) -> None:
        """Computes with `num_bytes` of DRAM while no request waits; queued reads go on meanwhile."""
        self._left_s = max(0.0, self._left_s - num_bytes / self._device.dram_bytes_per_s.value)

    def fetch_s(self, flash_s: float, active_bytes: int, kept_bytes: int, *, early: bool) -> float:
        """Returns the seconds of a request, see `fetch_seconds`.

        Its reads queue behind earlier ones. It waits for the earlier ones only if they bring some of its units
        (`early`), or if it reads, too.
        """
        reading_s = self._left_s + flash_s if early or flash_s else 0.0
        seconds = fetch_seconds(self._device, reading_s, active_bytes, kept_bytes)
        self._left_s = max(0.0, self._left_s + flash_s - seconds)
        return seconds


class Clock(Observer):
    """The modelled seconds of a store's requests on the artifact's device."""

    def __init__(self, manifest: Manifest, plan: Plan) -> None:
        """Begins at zero; `plan` says how many reads are in flight and which weights are used between requests."""
        self._queue = FlashQueue(manifest.device)
        self.follow(manifest, plan)
        self.flash_s = 0.0
        """Seconds of the reads alone, summed over requests."""
        self.fetch_s = 0.0
        """Seconds of the requests: reading, or computing and copying, whichever takes longer."""

    def follow(self, manifest: Manifest, plan: Plan) -> None:
        """Goes on under another plan."""
        self._flash = manifest.device.flash.issuing(plan.queue_depth)
        self._bytes_before = bytes_before(manifest, plan) if plan.preload_buffer_bytes else {}

    def start(self) -> None:
        """Counts from zero again; reads that are still queued stay."""
        self.flash_s = self.fetch_s = 0.0

    def request(self, facts: RequestFacts) -> None:
        """See `Observer`."""
        flash_s = modelled_flash_s(self._flash, facts.plan, facts.buffer_bytes, facts.room_bytes)
        self._queue.compute(self._bytes_before.get(facts.key, 0))
        self.flash_s += flash_s
        stored_bytes = facts.num_stored * facts.unit_bytes
        self.fetch_s += self._queue.fetch_s(flash_s, facts.active_bytes, stored_bytes, early=facts.num_early > 0)

    def read_ahead(self, facts: AheadFacts) -> None:
        """See `Observer`."""
        if facts.batch is not None:
            reads = facts.batch.extents
            flash_s = float(flash_seconds(self._flash, len(reads), reads.num_bytes))
            self.flash_s += flash_s
            self._queue.begin(flash_s)


def modelled_flash_s(flash: Flash, plan: planner.ReadPlan, buffer_bytes: int, room: int) -> float:
    """Returns the seconds of a plan's reads by a device's law, if a batch takes at most `room` bytes of the buffer."""
    portions = _under_way_together(plan, buffer_bytes, room)
    return sum(float(flash_seconds(flash, len(reads), reads.num_bytes)) for reads in portions)


def _under_way_together(plan: planner.ReadPlan, buffer_bytes: int, room: int) -> Iterator[Extents]:
    """Yields the groups of reads that a device works on together.

    If `room` is half of the buffer, that is all of them, because the device never idles; else one buffer at a time.
    """
    if room < buffer_bytes:
        yield plan.extents
    else:
        yield from (batch.extents for batch in planner.batches(plan, room))
