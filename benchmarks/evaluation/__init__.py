"""Quality of a model under a selector, by transformers' modules: what benchmarks and tests hold the runtime to."""
