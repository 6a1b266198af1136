rule quantize:
    input:
        model=SOURCE,
        sparsity=SPARSITY,
        gram=GRAM,
        importance=IMPORTANCE,
        activations=CALIBRATED,
        arrays=arrays(SOURCE, SPARSITY, GRAM, IMPORTANCE, CALIBRATED),
    output:
        record=f"{DEVICE}/quantize/{{chunk}}.json",
        arrays=directory(f"{DEVICE}/quantize/{{chunk}}"),
    log:
        f"{DEVICE}/logs/quantize/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/quantize/{{chunk}}.tsv"
    cache: CACHED
    resources:
        **needs("quantize"),
    params:
        **commands.params(CONFIG, "quantize"),
    shell:
        commands.job("quantize")
