"""Recipes of distill: what each moves, what it learns from, what it leaves alone, and that memory is counted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.checkpoint.tensors import read_role, stored_dtype
from coldpress.compiler.stages import distill
from coldpress.compiler.stages.distill import DistillationTask, Recipe, run
from coldpress.compiler.stages.distill._masks import masks_of
from coldpress.compiler.training.loop import loss_of
from coldpress.compiler.training.memory import Size
from coldpress.compiler.training.source import Source
from coldpress.runtime.plugins import load as plugin
from coldpress.runtime.plugins import names
from coldpress.runtime.quantization import int4_group32
from coldpress.schemas.errors import ColdpressError, UnknownNameError
from coldpress.schemas.families import FAMILIES
from coldpress.schemas.model import MLP_ROLES, Model
from tests.support.distilling import LAYERS, QUICK, corpus_at, held_out_divergence, load, model_at, top_k
from tests.support.statistics import model_of, workspace

LORA = QUICK.model_copy(update={"recipe": "lora", "options": {"lora_rank": 8, "lora_alpha": 16}, "learning_rate": 5e-3})


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(source, distilled with adapters)."""
    folder = tmp_path_factory.mktemp("adapted")
    model = model_at(folder, dtype=request.param)
    distilled = run(LORA, model, corpus_at(folder), top_k(model, folder, 0.15), workspace(folder / "d"), 1)
    return model.model_copy(update={"folder": str(folder / "checkpoint")}), model, distilled


@pytest.mark.slow
def test_adapters_bring_the_sparse_model_closer_once_they_are_fused(adapted) -> None:
    source, _, distilled = adapted
    before = held_out_divergence(load(source), load(source), 0.15)
    assert held_out_divergence(load(source), load(distilled), 0.15) < 0.9 * before


def test_adapters_are_of_their_rank_and_on_what_is_pruned(adapted) -> None:
    _, model, distilled = adapted
    for role in model.tensors:
        change = read_role(distilled, role) - read_role(model, role)
        if role.split(".")[-2] in MLP_ROLES:
            values = np.linalg.svd(change.astype(np.float64), compute_uv=False)
            assert values[7] > 1e-4
            assert values[8] < 1e-3 * values[0]
        else:
            assert not change.any(), role
            assert stored_dtype(distilled, role) == stored_dtype(model, role)


@pytest.mark.slow
def test_recipes_do_not_hang_on_threads(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config, sparsity = LORA.model_copy(update={"distill_steps": 2}), top_k(model, tmp_path)
    found = [run(config, model, corpus, sparsity, workspace(tmp_path / str(n)), n).weights_sha256 for n in (1, 3)]
    assert found[0] == found[1]


def test_fused_matrices_are_adapted_once(tmp_path: Path) -> None:
    """Phi-3 keeps gate and up in one tensor."""
    model, corpus = model_at(tmp_path, "phi3"), corpus_at(tmp_path)
    config = LORA.model_copy(update={"distill_steps": 1})
    distilled = run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "d"), 1)
    changed = {role for role in model.tensors if (read_role(distilled, role) != read_role(model, role)).any()}
    assert changed == {f"layers.{layer}.{role}.weight" for layer in range(LAYERS) for role in MLP_ROLES}


def test_the_student_runs_with_rounded_weights_and_trains_its_own(tmp_path: Path) -> None:
    model = model_at(tmp_path)
    sparsity = top_k(model, tmp_path).model_copy(update={"format": "int4_group32"})
    recipe, source = plugin("coldpress.compiler.stages.distill", Recipe, "self"), Source.of(model)
    task = DistillationTask(source, sparsity, masks_of(model.spec, sparsity), 0, "cpu", False)
    lesson = recipe.prepare(task, recipe.OPTIONS(rounded=True))
    names = {"rows": "self_attn.q_proj", "columns": "mlp.gate_proj"}
    own = {at: lesson.student.get_parameter(f"model.layers.0.{name}.weight") for at, name in names.items()}
    exact = {at: value.detach().clone() for at, value in own.items()}
    with lesson.running():
        seen = {at: value.detach().clone() for at, value in own.items()}
    for at, value in exact.items():
        rows = value.numpy() if at == "rows" else np.ascontiguousarray(value.numpy().T)
        decoded = int4_group32.Plugin().decode(int4_group32.Plugin().encode(rows), rows.shape[1])
        expected = decoded if at == "rows" else decoded.T
        assert (seen[at].numpy() == expected).all()
        assert (own[at] == value).all()
        assert not torch.equal(seen[at], value)


@pytest.fixture(params=["llama", "phi3"])
def rounded_lesson(request: pytest.FixtureRequest, tmp_path: Path):
    """(lesson of `lora` with rounding, its source, its format's decision), with adapters that add something."""
    model = model_at(tmp_path, request.param, dtype="float16")
    sparsity = top_k(model, tmp_path).model_copy(update={"format": "int4_group32"})
    recipe, source = plugin("coldpress.compiler.stages.distill", Recipe, "lora"), Source.of(model)
    options = recipe.OPTIONS(rounded=True, lora_rank=4, lora_alpha=8)
    lesson = recipe.prepare(
        DistillationTask(source, sparsity, masks_of(model.spec, sparsity), 0, "cpu", False), options
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in lesson.parameters:
            parameter.copy_(0.05 * torch.randn_like(parameter))
    return lesson, source, sparsity


def rounded_role(values: np.ndarray, role: str, sparsity) -> np.ndarray:
    """A matrix as rtn in int4 says it, along columns where the method prunes its inputs."""
    columns = {
        piece.role for family in sparsity.families for piece in FAMILIES[family].slices if piece.axis == "column"
    }
    rows = values.T if role.split(".")[-2] in columns else values
    rows = np.ascontiguousarray(rows)
    decoded = int4_group32.Plugin().decode(int4_group32.Plugin().encode(rows), rows.shape[1])
    return decoded.T if role.split(".")[-2] in columns else decoded


def fused_and_rounded(source: Source, weight, sparsity, name: str) -> torch.Tensor:
    """One of transformers' tensors as the build will hold what `weight` gives, role by role."""
    values, start, parts = weight(name).float().numpy(), 0, []
    for role in source.names[name]:
        stop = start + source.model.tensors[role].shape[0]
        part = values[start:stop]
        parts.append(rounded_role(part, role, sparsity) if part.ndim > 1 and role.startswith("layers.") else part)
        start = stop
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(parts)))


def test_adapters_run_fused_and_rounded_and_learn_straight_through(rounded_lesson) -> None:
    """Logits are of a model that holds what rtn makes of the result; gradients are those of its weights, projected."""
    lesson, source, sparsity = rounded_lesson
    reference = source.build("cpu")
    with torch.no_grad():
        for name in source.names:
            reference.get_parameter(name).copy_(fused_and_rounded(source, lesson.weight, sparsity, name))
    block = torch.arange(12)[None] + 3
    lesson.masks.on = False
    with torch.no_grad():
        dense = lesson.student(input_ids=block, use_cache=False).logits
    with lesson.running():
        logits = lesson.student(input_ids=block, use_cache=False).logits
        gradients = torch.autograd.grad(logits.square().sum(), lesson.parameters)
    expected = reference(input_ids=block, use_cache=False).logits
    expected.square().sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert (logits - dense).abs().max() > 1e-3
    named = {id(parameter): name for name, parameter in lesson.student.named_parameters()}
    found = {named[id(parameter)]: gradient for parameter, gradient in zip(lesson.parameters, gradients, strict=True)}
    for name, gradient in found.items():
        if ".lora_B." in name:
            whole = reference.get_parameter(name.replace(".lora_B.learned", "")).grad
            down = dict(lesson.student.named_parameters())[name.replace("lora_B", "lora_A")]
            torch.testing.assert_close(gradient, 2.0 * whole @ down.T, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        again = lesson.student(input_ids=block, use_cache=False).logits
    assert torch.equal(again, dense), "outside, weights are themselves"


def test_the_teacher_of_rounded_adapters_is_the_source(rounded_lesson) -> None:
    lesson, source, _ = rounded_lesson
    block = torch.arange(12)[None] + 3
    lesson.teach(True)
    with torch.no_grad():
        found = lesson.teacher(input_ids=block, use_cache=False).logits
        expected = source.build("cpu")(input_ids=block, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_divergence_and_the_texts_own_tokens() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]), torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]])
    block = torch.tensor([0, 1])
    divergence = 0.5 * (0.5 * np.log(2) + 0.25 * np.log(0.5))  # over two tokens, the second alike
    assert loss_of(p.log(), q.log(), block).item() == pytest.approx(divergence, rel=1e-5)
    assert loss_of(p.log(), q.log(), block, 1.0).item() == pytest.approx(-np.log(0.5), rel=1e-5)
    mixed = 0.75 * divergence - 0.25 * np.log(0.5)
    assert loss_of(p.log(), q.log(), block, 0.25).item() == pytest.approx(mixed, rel=1e-5)


def test_the_texts_own_tokens_can_be_all_that_is_learned_from(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    found = {}
    for share in (0.0, 1.0):
        config = QUICK.model_copy(update={"distill_steps": 2, "options": {"cross_entropy": share}})
        distilled = run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / f"{share}"), 1)
        assert distilled.distillation is not None
        found[share] = distilled.distillation.curve[-1].loss
    assert found[1.0] > 5  # of 320 random tokens: log(320) = 5.8
    assert found[0.0] < 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", names("coldpress.compiler.stages.distill"))
def test_a_student_that_also_runs_dense_stays_nearer_to_the_dense_model(tmp_path: Path, recipe: str) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    source = model.model_copy(update={"folder": str(tmp_path / "checkpoint")})
    base = {"self": QUICK, "lora": LORA}[recipe]
    found = {}
    for share in (0.0, 0.5):
        config = base.model_copy(update={"distill_steps": 8, "distill_dense_share": share})
        distilled = run(config, model, corpus, top_k(model, tmp_path, 0.15), workspace(tmp_path / f"{share}"), 2)
        found[share] = held_out_divergence(load(source), load(distilled), 1.0)
    assert 0 < found[0.5] < 0.7 * found[0.0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", names("coldpress.compiler.stages.distill"))
def test_weights_go_back_to_the_source_as_far_as_nine_tenths_of_the_gain_stay(tmp_path: Path, recipe: str) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    source = model.model_copy(update={"folder": str(tmp_path / "checkpoint")})
    sparsity, base = top_k(model, tmp_path, 0.15), {"self": QUICK, "lora": LORA}[recipe]
    whole, part = (
        run(
            base.model_copy(update={"distill_kept_gain": kept}),
            model,
            corpus,
            sparsity,
            workspace(tmp_path / f"{kept}"),
            2,
        )
        for kept in (1.0, 0.9)
    )
    assert whole.distillation is not None
    assert part.distillation is not None
    share = part.distillation.share
    assert whole.distillation.share == 1
    assert 0.5 <= share < 1
    for role in model.tensors:
        begin, end = read_role(model, role), read_role(whole, role)
        np.testing.assert_allclose(read_role(part, role), begin + share * (end - begin), atol=1e-6, err_msg=role)
    sparse, dense = (
        [held_out_divergence(load(source), load(found), density) for found in (source, whole, part)]
        for density in (0.15, 1.0)
    )
    assert sparse[0] - sparse[2] > 0.8 * (sparse[0] - sparse[1]), "on other text than share was chosen by"
    assert dense[2] < 0.9 * dense[1]


def test_what_training_made_worse_is_the_source_and_goes_nowhere(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config = QUICK.model_copy(update={"distill_steps": 2, "learning_rate": 10.0, "distill_kept_gain": 0.9})
    distilled = run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "d"), 1)
    assert distilled.distillation is not None
    assert distilled.distillation.share == 1
    assert all((read_role(distilled, role) == read_role(model, role)).all() for role in model.tensors)


def test_unknown_recipes_and_options_are_refused(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    sparsity, work = top_k(model, tmp_path), workspace(tmp_path / "d")
    with pytest.raises(UnknownNameError, match=r"distill 'loro'.*lora"):
        run(QUICK.model_copy(update={"recipe": "loro"}), model, corpus, sparsity, work, 1)
    with pytest.raises(ColdpressError, match="lora_rank"):
        run(QUICK.model_copy(update={"options": {"lora_rank": 8}}), model, corpus, sparsity, work, 1)


SEVEN_BILLION = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rotary_dim": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def size_of(model: Model, families: tuple[str, ...], block_tokens: int, threads: int, weight_bytes: int) -> Size:
    shapes = {role: source.shape for role, source in model.tensors.items()}
    return Size(model.spec, shapes, families, block_tokens, threads, weight_bytes, "int4_group32")


def test_seven_billion_parameters_fit_24_gb_with_adapters_only() -> None:
    """Llama-2-7B, top-k on all linear layers, adapters of rank 32 on all of them, blocks of 512 tokens."""
    model = model_of(**SEVEN_BILLION)
    assert model.num_parameters == 6_738_415_616
    size = size_of(model, ("attn_in", "attn_out", "mlp_in", "mlp_mid"), 512, 1, 2 * model.num_parameters)
    adapters = 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    least = 2 * model.num_parameters + 4 * 6 * adapters  # weights; adapters, gradients twice, two moments, the best
    assert least < distill.ram_bytes(size, "lora", {}) < 24e9
    whole = distill.ram_bytes(size, "self", {})
    assert whole > 7 * 4 * model.num_parameters  # teacher, student, gradients twice, two moments, the best
    assert distill.ram_bytes(replace(size, threads=2), "self", {}) > whole + 4 * model.num_parameters
    assert distill.ram_bytes(size, "self", {"rounded": True}) == whole + 4 * model.num_parameters
    in_layers = model.num_parameters - 2 * 32000 * 4096 - 65 * 4096  # embeddings and head, norms
    rounded = distill.ram_bytes(size, "lora", {"rounded": True})
    assert rounded == distill.ram_bytes(size, "lora", {}) + in_layers * 18 // 32 < 24e9
    assert distill.disk_bytes(size, "lora", {}) == 4 * model.num_parameters + 2 * 4 * 4 * adapters


@pytest.mark.parametrize("recipe", names("coldpress.compiler.stages.distill"))
def test_more_threads_longer_blocks_and_more_layers_need_more_memory(recipe: str) -> None:
    def needs(threads: int = 1, tokens: int = 256, layers: int = 2) -> int:
        model = model_of(num_hidden_layers=layers)
        return distill.ram_bytes(size_of(model, ("mlp_in",), tokens, threads, 1 << 20), recipe, {})

    assert needs() < needs(threads=2) < needs(threads=3) == 2 * needs(threads=2) - needs()
    assert needs() < needs(tokens=512)
    assert needs() < needs(layers=3)


def test_layers_that_run_again_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config, sparsity = QUICK.model_copy(update={"distill_steps": 2}), top_k(model, tmp_path)
    kept = run(config, model, corpus, sparsity, workspace(tmp_path / "kept"), 1)
    monkeypatch.setattr("coldpress.compiler.training.memory.KEPT_BYTES", 0)
    again = []
    monkeypatch.setattr("coldpress.compiler.training.source.recompute_layers", _told(again))
    assert run(config, model, corpus, sparsity, workspace(tmp_path / "again"), 1).weights_sha256 == kept.weights_sha256
    assert again


def _told(calls: list):
    from coldpress.compiler.training import source

    whole = source.recompute_layers

    def recompute(*arguments) -> None:
        calls.append(arguments)
        whole(*arguments)

    return recompute


def test_weights_are_written_layer_by_layer(tmp_path: Path) -> None:
    model = model_at(tmp_path)
    source, asked = Source.of(model), []

    def weight(name: str) -> torch.Tensor:
        asked.append((name, len(list((tmp_path / "out").glob("model-*")))))
        return source.tensor(source.names[name])

    source.write(weight, tmp_path / "out")
    for name, written in asked:  # those of a layer are asked for once the layer before is on the disk
        assert written == (int(name.split(".")[2]) + 1 if ".layers." in name else 0), name
    assert len(read_header(tmp_path / "out" / "model-00002-of-00003.safetensors")) == 9
