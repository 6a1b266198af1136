"""Which units a token uses. A file is a method; its module has what runtime/model/selection.py and the compiler rely
on:

`FAMILIES` it can choose from; `NEEDS_PREDICTORS`; `NEEDS_EXACT_ZEROS` (a ReLU model); `fit(num_units, density, arrays)`
-> its parameters for one layer's family; `select(signal, parameters, cached)` -> ids, int32, distinct, ascending. The
signal is the MLP's input after its norm for `neuron` and `mlp_in`, act(gate) for `up_down`, and act(gate) * up (without
a gate: act(up)) for `mlp_mid`.
"""
