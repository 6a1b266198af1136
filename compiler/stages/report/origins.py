"""Lists what an artifact was made from and with: checkpoint, text, device, settings, compiler, libraries."""

from coldpress.compiler.stages.report.page_charts import Inputs
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.provenance import Provenance


def origins(inputs: Inputs, made_by: Provenance) -> list[tuple[str, str]]:
    model, heuristics = inputs.model, {entry.heuristic for part in inputs.order for entry in part.entries}
    at = f" at {model.revision}" if model.revision else ""
    return [
        ("artifact", inputs.package.manifest_sha256),
        ("source", f"{model.name} ({model.source}{at}), {model.num_parameters:,} parameters"),
        ("weights", model.weights_sha256),
        ("licence", model.license or "not stated"),
        ("corpus", f"{inputs.corpus.name}, text {inputs.corpus.text_sha256}"),
        ("calibration", f"{inputs.activations.num_tokens:,} tokens, tokenized with seed {inputs.seed}"),
        ("context", f"{inputs.plans.largest_plan.context_length} tokens"),
        ("order", ", ".join(sorted(heuristics))),
        ("placement", f"within {100 * inputs.placement.gap:.2f} % of the optimum"),
        ("collapse gap", f"{inputs.plans.largest_plan.collapse_gap_bytes} bytes"),
        *made_with(made_by),
        ("device", inputs.device.title),
        *figures_of(inputs.device),
    ]


def made_with(made_by: Provenance) -> list[tuple[str, str]]:
    return [
        ("compiler", f"coldpress {made_by.compiler_version}"),
        ("commit", _commit(made_by)),
        ("Python", made_by.python_version),
        ("libraries", ", ".join(f"{name} {version}" for name, version in sorted(made_by.libraries.items()))),
    ]


def _commit(made_by: Provenance) -> str:
    if made_by.commit is None:
        return "not known: the compiler did not run from a checkout"
    return made_by.commit + (", with changes that are not committed" if made_by.dirty else "")


def figures_of(device: DeviceProfile) -> list[tuple[str, str]]:
    """Returns the device's figures that decide speed, each with its source, which has the date of a measurement."""
    flash = device.flash
    curve = flash.read_curve.value[-1]
    return [
        ("DRAM", f"{device.dram_bytes.value:,} bytes: {device.dram_bytes.source}"),
        ("DRAM bandwidth", f"{device.dram_bytes_per_s.value / 1e9:.3g} GB/s: {device.dram_bytes_per_s.source}"),
        ("flash reads", f"{curve.bytes_per_s / 1e9:.3g} GB/s at {curve.read_bytes:,} bytes: {flash.read_curve.source}"),
        ("flash latency", f"{1e6 * flash.latency_s.value:.3g} µs: {flash.latency_s.source}"),
    ]
