"""The law of computing, by hand: rates by format and density, copies, calls, and what overlaps."""

import pytest
from pydantic import ValidationError

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.store import computing, resident
from coldpress.runtime.store.computing import NOTHING, Arrival, Weights, Work
from coldpress.schemas.compute import Compute, overlapped_seconds
from tests.support.artifacts import Recipe, build_artifact
from tests.support.devices import with_compute
from tests.support.shapes import small_device, small_spec

MIB = 1 << 20
RATES = (("fp16", 1.0, 16e9), ("int4_group32", 0.1, 2e9), ("int4_group32", 0.5, 4e9), ("int4_group32", 1.0, 8e9))
COSTS = {"request_s": 2e-6, "reading_s": 3e-6, "portion_s": 1e-6, "layer_s": 1e-5, "token_s": 1e-4}


@pytest.mark.parametrize(
    ("format_name", "density", "bytes_per_s"),
    [
        ("int4_group32", 0.1, 2e9),
        ("int4_group32", 0.3, 3e9),
        ("int4_group32", 0.75, 6e9),
        ("int4_group32", 0.01, 2e9),
        ("fp16", 0.1, 16e9),
        ("int8_group32", 0.5, 2e10),
        (None, 1.0, 2e10),
    ],
)
def test_weights_take_the_rate_of_their_format_and_density(format_name, density, bytes_per_s):
    """Between the stated densities; at the nearest one outside of them; at DRAM bandwidth without any."""
    device = with_compute(small_device(), RATES)
    assert computing.weight_seconds(device, format_name, 1000.0, density) == pytest.approx(1000.0 / bytes_per_s)


def test_without_rates_every_byte_takes_dram_bandwidth():
    device = small_device()
    work = computing.request_work(device, Weights("fp16", 4 * MIB), MIB, 2 * MIB, MIB, 3)
    used_s = MIB / 2e10
    assert work == Work(0.0, pytest.approx(used_s), pytest.approx(4 * used_s))  # the copy reads and writes
    assert "lower bound" in computing.basis(device)


def test_a_request_decides_computes_with_what_is_there_reads_and_computes_with_that():
    """Half of the units are used, three quarters of these from DRAM."""
    device = with_compute(small_device(), RATES, copy_bytes_per_s=1e9, **COSTS)
    weights = Weights("int4_group32", 2_000_000)
    ready_s, arriving_s = 750_000 / 4e9, 250_000 / 4e9 + 250_000 / 1e9 + 1e-6
    for flash_s, first_s in ((0.01, 0.01), (0.0001, ready_s)):
        found = computing.fetch_seconds(device, weights, Arrival(flash_s, 1, True), 750_000, 250_000, 250_000)
        assert found == pytest.approx(5e-6 + first_s + arriving_s)
    found = computing.fetch_seconds(device, weights, NOTHING, 1_000_000, 0, 0)
    assert found == pytest.approx(2e-6 + 1_000_000 / 4e9)
    assert "int4_group32" in computing.basis(device)


def test_units_that_were_read_ahead_are_a_portion_of_their_own():
    """Two fifths of the bytes were preloaded and arrive in one portion; the request reads the others in two."""
    device = with_compute(small_device(), RATES, copy_bytes_per_s=1e9, **COSTS)
    weights = Weights("int4_group32", 2_000_000)
    work = computing.request_work(device, weights, 750_000, 250_000, 250_000, 2, 100_000)
    used_s = 250_000 / 4e9 + 250_000 / 1e9
    assert work == pytest.approx((5e-6, 750_000 / 4e9, 0.6 * used_s + 2e-6, 0.4 * used_s + 1e-6))
    # decides, admits and evicts as if it read
    alone = computing.request_work(device, weights, 0, 100_000, 0, 0, 100_000)
    assert alone == pytest.approx((5e-6, 0.0, 0.0, 100_000 / 2e9 + 1e-6))


def test_units_that_were_read_ahead_are_used_when_they_are_there_and_before_the_others():
    reads = Arrival(6.0, 1, True)
    assert (
        Work(1.0, 2.0, 3.0, 4.0).with_reads(reads, 5.0) == 1 + 11 + 3
    )  # the device is done at 11, preloaded units at 9
    assert Work(1.0, 2.0, 3.0, 8.0).with_reads(reads, 5.0) == 1 + 5 + 8 + 3
    assert Work(1.0, 9.0, 3.0, 8.0).with_reads(reads, 5.0) == 1 + 9 + 8 + 3
    assert Work(1.0, 2.0, 0.0, 4.0).with_reads(NOTHING, 5.0) == 1 + 5 + 4


@pytest.mark.parametrize("ready_s", [0.0, 1.5, 7.0, 40.0])
@pytest.mark.parametrize(("queued_s", "preloaded_s"), [(0.0, 0.0), (4.0, 0.0), (4.0, 3.0), (0.0, 3.0)])
@pytest.mark.parametrize("read_s", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("used_s", [0.25, 2.0, 4.0])
@pytest.mark.parametrize("portions", [1, 2, 3, 9])
@pytest.mark.parametrize("halves", [1, 2])
def test_portions_flow_from_the_device_to_the_processor(
    ready_s, queued_s, preloaded_s, read_s, used_s, portions, halves
):
    """Step by step: a portion is read into a free half, and used when it is there and the one before has been used."""
    used = [max(ready_s, queued_s) + preloaded_s if preloaded_s else ready_s]  # when each was used
    device_s = queued_s
    for number in range(portions):
        free_s = used[number - halves + 1] if number >= halves else 0.0
        device_s = max(device_s, free_s) + read_s
        used.append(max(device_s, used[-1]) + used_s)
    work = Work(3.0, ready_s, portions * used_s, preloaded_s)
    reads = Arrival(portions * read_s, portions, halves == 2)
    assert work.with_reads(reads, queued_s) == pytest.approx(3.0 + used[-1])


def test_a_token_takes_its_resident_weights_its_layers_and_itself(tmp_path):
    """Twelve layers; the matrices of each format at their own rate, the rest at DRAM bandwidth."""
    recipe = Recipe(small_spec(), method="dense", format="int4_group32")
    artifact = open_artifact(build_artifact(tmp_path / "a", recipe).path)
    device = with_compute(artifact.manifest.device, RATES, **COSTS)
    manifest = artifact.manifest.model_copy(update={"device": device})
    plan = manifest.plans[0]
    sizes = resident.computed_bytes(manifest, plan)
    assert set(sizes) == {"int4_group32", "int8_group32", None}
    by_format = sizes["int4_group32"] / 8e9 + (sizes["int8_group32"] + sizes[None]) / 2e10
    assert resident.token_seconds(manifest, plan) == pytest.approx(by_format + 12 * 1e-5 + 1e-4)
    before = resident.seconds_before(manifest, plan)
    assert len(before) == 12
    assert min(before.values()) > 1e-5


@pytest.mark.parametrize(("overlap", "seconds"), [("none", 5.0), ("request", 4.0), ("all", 3.0)])
def test_what_overlaps_is_one_choice(overlap, seconds):
    assert overlapped_seconds(overlap, flash_s=3.0, computing_s=2.0, requests_s=4.0) == seconds


@pytest.mark.parametrize("rates", [(), RATES[::-1], (*RATES, RATES[-1])])
def test_rates_are_sorted_and_stated_once(rates):
    with pytest.raises(ValidationError, match="sorted by format and density, each once"):
        with_compute(small_device(), rates)


def test_a_rate_that_no_device_has_is_refused():
    with pytest.raises(ValidationError, match="copy_bytes_per_s must be from 1 to 1e"):
        with_compute(small_device(), RATES, copy_bytes_per_s=0.5)
    with pytest.raises(ValidationError, match="token_s must be from 0 to 3600"):
        Compute.model_validate(
            {
                "rates": {"value": ({"format": "fp16", "density": 1.0, "bytes_per_s": 1e9},), "source": "a test"},
                "token_s": {"value": -1.0, "source": "a test"},
            }
        )
