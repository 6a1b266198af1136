"""What differs between architectures. A file is an architecture and its name is Hugging Face's `model_type`; it has

`KEYS`, what it reads of config.json beside `_common.KEYS`; `MODULES`, where transformers keeps its parts;
`spec(config)` -> ModelSpec; `parameters(config, spec)` -> {tensor name: roles}, several roles being stacked rows.
`config` is transformers' own configuration object, with all defaults filled in.
"""
