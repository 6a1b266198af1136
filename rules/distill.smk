rule distill:
    input:
        model=DENSE,
        corpus=CORPUS,
        sparsity=SPARSITY,
        arrays=arrays(DENSE, CORPUS, SPARSITY),
    output:
        record=f"{DEVICE}/distill.json",
        arrays=directory(f"{DEVICE}/distill"),
    log:
        f"{DEVICE}/logs/distill.log",
    benchmark:
        f"{DEVICE}/benchmarks/distill.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("distill"),
    params:
        **commands.params(CONFIG, "distill"),
    shell:
        commands.job("distill")
