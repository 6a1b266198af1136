"""layout: offsets by hand."""

from coldpress.compiler.stages.layout import LayoutConfig, run
from coldpress.schemas.layout import SECTION_ALIGN_BYTES
from tests.compiler.test_plan import records


def lay_out(model, sparsity, placement, device):
    return run(LayoutConfig(), model, sparsity, device)


def test_offsets_by_hand(tmp_path):
    # mlp_in: 64 units of a gate and an up column, 72 values each in 3 groups of 34 bytes; mlp_mid: 72 of 2 groups.
    layout = lay_out(*records(tmp_path))
    assert all(part.last_layer == part.first_layer and part.stride_bytes == part.unit_bytes for part in layout.sections)
    found = [
        (part.first_layer, part.family, part.offset_bytes, part.num_units, part.unit_bytes) for part in layout.sections
    ]
    assert found == [
        (0, "mlp_in", 0, 64, 204),
        (0, "mlp_mid", 65536, 72, 68),
        (1, "mlp_in", 131072, 64, 204),
        (1, "mlp_mid", 196608, 72, 68),
    ]
    (table,) = layout.tables  # 384 rows of 64 values in 2 groups
    assert (table.role, table.offset_bytes) == ("embed_tokens.weight", 262144)
    assert (table.num_rows, table.row_bytes, table.format) == (384, 68, "int8_group32")
    assert layout.flash_bytes == 327680


def test_sections_longer_than_the_alignment_are_packed_from_the_next_multiple(tmp_path):
    layout = lay_out(*records(tmp_path, "dense", "fp16", intermediate_size=1000))
    assert [part.offset_bytes for part in layout.sections] == [0, 6 * SECTION_ALIGN_BYTES]  # 384,000 bytes each
    assert [table.offset_bytes for table in layout.tables] == [12 * SECTION_ALIGN_BYTES]
    assert layout.flash_bytes == 13 * SECTION_ALIGN_BYTES
