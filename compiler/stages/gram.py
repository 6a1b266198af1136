"""gram: computes X Xᵀ of the inputs of every matrix, for error-correcting algorithms of `quantize` (GPTQ, Eq. 1).

Each layer sees its signals after the build's selector, so that a matrix is rounded for the inputs that it will have
(compiler/activity/gram_pass.py). A build has this stage only if its algorithm asks for it.
"""

from typing import TYPE_CHECKING

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import choice_of
from coldpress.compiler.activity.gram_pass import GRAM_TOKENS, add_grams
from coldpress.compiler.io import Workspace
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.gram import GramMatrices
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build


class GramConfig(ComputeConfig):
    """Settings of `gram`."""


def run(
    config: GramConfig, model: Model, corpus: Corpus, sparsity: Sparsity, work: Workspace, threads: int
) -> GramMatrices:
    """Computes Gram matrices over the first calibration blocks; raises ColdpressError if torch has no such device."""
    stream, _ = stream_of(config, model, threads)
    sparsity = sparsity.smallest
    selector = load("coldpress.runtime.sparsity", Selector, sparsity.method)
    is_whole = sparsity.is_whole or selector.EXACT
    choice = None if is_whole else choice_of(sparsity, model.spec)
    return add_grams(stream, corpus, work, sparsity.families, choice)


def needs(build: "Build") -> StageNeeds:
    spec = build.model.spec
    tokens = min(GRAM_TOKENS, build.num_tokens)
    running = build.running_bytes(8, 12)
    hidden, grams = 2 * 4 * tokens * spec.hidden_size, sum(build.gram_bytes)
    ram_bytes = build.TORCH_BYTES + build.layer_weights_bytes + running + hidden + grams
    return StageNeeds(stage="gram", ram_bytes=ram_bytes, disk_bytes=spec.num_hidden_layers * grams)
