"""What leaving out an input costs, from gradients: the diagonal of Fisher's information of the signals of MLPs.

To second order, the KL divergence of a model from itself with entry i of a signal zeroed is half the information of
that entry times its square. It is estimated with targets drawn from the model's own predictions.
"""

from typing import Any

import numpy as np

from tests.support.data import find_data_folder


def fisher(name: str, tokens: np.ndarray, num_layers: int) -> dict[tuple[int, str], np.ndarray]:
    """float64 [num_units] of `mlp_in` and `mlp_mid` in each layer of a Llama, means over int tokens [num_blocks, T]."""
    import torch
    from transformers import AutoModelForCausalLM

    data = find_data_folder()
    assert data is not None
    model = AutoModelForCausalLM.from_pretrained(data / "models" / name, dtype=torch.float32).eval()
    seen: dict[tuple[int, str], torch.Tensor] = {}

    def keep(key: tuple[int, str]) -> Any:
        def see(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            inputs[0].retain_grad()
            seen[key] = inputs[0]

        return see

    for layer in range(num_layers):
        mlp = model.model.layers[layer].mlp
        mlp.register_forward_pre_hook(keep((layer, "mlp_in")))
        mlp.down_proj.register_forward_pre_hook(keep((layer, "mlp_mid")))
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[int, str], np.ndarray] = {}
    for block in tokens:
        logits = model(torch.from_numpy(block.astype(np.int64))[None]).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
        for key, signal in seen.items():
            assert signal.grad is not None
            found[key] = found.get(key, np.zeros(signal.shape[-1])) + (signal.grad[0].double() ** 2).mean(0).numpy()
    return {key: total / len(tokens) for key, total in found.items()}
