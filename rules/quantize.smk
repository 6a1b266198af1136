rule quantize:
    input:
        model=SOURCE,
        sparsity=f"{DEVICE}/allocate.json",
        gram=GRAM,
        importance=IMPORTANCE,
        activations=f"{MODEL}/calibrate.json",
        arrays=arrays(SOURCE, f"{DEVICE}/allocate.json", GRAM, IMPORTANCE, f"{MODEL}/calibrate.json"),
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
