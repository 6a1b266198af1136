rule predict:
    input:
        model=SOURCE,
        activations=RECALIBRATED,
        sparsity=SPARSITY,
        arrays=arrays(SOURCE, RECALIBRATED, SPARSITY),
    output:
        record=f"{DEVICE}/predict/{{chunk}}.json",
        arrays=directory(f"{DEVICE}/predict/{{chunk}}"),
    log:
        f"{DEVICE}/logs/predict/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/predict/{{chunk}}.tsv"
    cache: CACHED
    resources:
        **needs("predict"),
    params:
        **commands.params(CONFIG, "predict"),
    shell:
        commands.job("predict")
