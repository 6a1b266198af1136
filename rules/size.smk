rule size:
    input:
        model=SOURCE,
        corpus=CORPUS,
        sparsity=SPARSITY,
        trained=per_chunk("predict"),
        arrays=arrays(SOURCE, CORPUS, SPARSITY, per_chunk("predict")),
    output:
        record=f"{DEVICE}/size.json",
    log:
        f"{DEVICE}/logs/size.log",
    benchmark:
        f"{DEVICE}/benchmarks/size.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("size"),
    params:
        **commands.params(CONFIG, "size"),
    shell:
        commands.job("size")
